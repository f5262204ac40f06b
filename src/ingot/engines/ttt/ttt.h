#pragma once
// Test-time training (parameter-golf's rule): each document has low-rank adapters of its own, which learn from what has
// been scored of it. Documents go by chunks of tokens; a chunk is scored with adapters that have seen only the chunks
// before it, and then learnt from, with one step of AdamW on the mean of its losses. Each time the whole window that
// ends with the chunk runs through the model as it is then. The base weights never change, a document's last chunk is
// never learnt from, and no document's score depends on another, or on which were batched together.
#include <functional>
#include <memory>
#include <vector>

#include "ingot/engines/train/evaluate.h"
#include "ingot/engines/ttt/adapters.h"

namespace ingot {

// What happened, in its order: a chunk's score, and the step it caused.
struct AdaptationEvent {
  enum Kind : uint8_t { score, update } kind = score;
  int64_t document = 0, chunk = 0;
  int64_t first = 0, end = 0;  // the chunk's targets, counted in the source
  int64_t updates = 0;         // that the document's adapters had made when it was scored; after an update
  double loss_sum = 0;         // of a score
};

// Ways to run far fewer tokens, which give other scores than the rule's: none unless asked for. Both learn from the
// chunk's own rows alone, gradients through the keys and values of earlier ones left out. stale_keys keeps these as
// they were when their chunk was scored; chunk_gradients forms them with the adapters as they are now.
enum class Inexact : uint8_t { none, stale_keys, chunk_gradients };

struct AdaptationOptions {
  AdapterOptions adapters;
  Inexact inexact = Inexact::none;
  bool any_order =
      false;  // on a GPU attention adds up gradients in any order: faster, and last bits vary from run to run
  int64_t chunk = 32, window = 2048;
  int64_t documents = 64;  // of whole windows adapted side by side; on a GPU of shorter ones up to kShorter as many
  bool looping = false;
  Products products = Products::fp32;
  Stream stream;
  const SafetensorsFile* begin_from = nullptr;  // adapters that every document begins with
  std::function<void(const AdaptationEvent&)> listener;
  std::function<void(int64_t done, int64_t all)> progress;  // targets
  std::function<bool()> cancelled;
  // Processes that share the documents, all for the same result. A batch of documents is claimed where this rank has
  // done its last one: `claim` gives each number to one rank, from 0; left out, batches are dealt out in turn.
  Communicator* ranks = nullptr;
  std::function<int64_t()> claim;
};
constexpr int64_t kShorter = 4;
void check(const AdaptationOptions& o, const GptConfig& config);

struct AdaptedScore : Score {
  int64_t window_tokens = 0;  // that ran through the model
  int64_t updates = 0;
  // Of steps whose windows were all whole and followed such a step of the same documents: their tokens, and the time
  // from one step's losses to the next one's. Of several ranks the sums of both.
  int64_t whole_tokens = 0;
  double whole_seconds = 0;
};

// `documents`, when given, receives one entry per document of the source. Of several ranks each returns all of it;
// its listener hears of what it adapted itself.
AdaptedScore score_adapted(const GptConfig& config, const GptWeights& weights, const Tokenizer& tokenizer,
                           std::shared_ptr<const TokenSource> source, const AdaptationOptions& options,
                           std::vector<DocumentScore>* documents = nullptr);

// Adapters that have learnt a text, all of it, to go on with: `tokens`, bos included where there is one, chunk by chunk
// and `passes` times.
struct Adapted {
  std::unique_ptr<DocumentAdapters> adapters;  // of one document, where the weights are
  double loss = 0;                             // mean of the first pass, each chunk scored before it was learnt from
  int64_t targets = 0, updates = 0;
};
Adapted adapt(const GptConfig& config, const GptWeights& weights, std::span<const int32_t> tokens,
              const AdaptationOptions& options, int64_t passes = 1);

}  // namespace ingot
