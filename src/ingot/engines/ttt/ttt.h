#pragma once
// Test-time training (by the rule of parameter-golf): each document has its own low-rank adapters, which learn from the
// already scored part of the document. A document is processed in chunks of tokens. A chunk is scored with adapters
// trained only on earlier chunks; the adapters then make one step of AdamW on the mean of the chunk's losses. For each
// chunk, the whole window that ends with the chunk runs through the current model. The base weights never change, no
// step follows a document's last chunk, and a document's score depends neither on other documents nor on the batches.
#include <functional>
#include <memory>
#include <vector>

#include "ingot/engines/train/evaluate.h"
#include "ingot/engines/ttt/adapters.h"

namespace ingot {

// The events in their order: the score of a chunk, then the step that follows it.
struct AdaptationEvent {
  enum Kind : uint8_t { score, update } kind = score;
  int64_t document = 0, chunk = 0;
  int64_t first = 0, end = 0;  // the chunk's targets, counted in the source
  int64_t updates = 0;         // steps of the document's adapters before the chunk's score; after an update
  double loss_sum = 0;         // of a score event
};

// Two ways to run far fewer tokens. Their scores differ from the rule's, so both are off by default. Both learn from
// the chunk's own rows alone, without gradients through the keys and values of earlier chunks. stale_keys keeps these
// keys and values from the scoring of their chunk; chunk_gradients recomputes them with the current adapters.
enum class Inexact : uint8_t { none, stale_keys, chunk_gradients };

struct AdaptationOptions {
  AdapterOptions adapters;
  Inexact inexact = Inexact::none;
  // On a GPU: attention adds gradients in any order, which is faster; the last bits vary from run to run.
  bool any_order = false;
  int64_t chunk = 32, window = 2048;
  // The number of concurrent documents with whole windows; on a GPU up to kShorter times as many shorter documents.
  int64_t documents = 64;
  bool looping = false;
  Products products = Products::fp32;
  Stream stream;
  const SafetensorsFile* begin_from = nullptr;  // the first adapters of every document
  std::function<void(const AdaptationEvent&)> listener;
  std::function<void(int64_t done, int64_t all)> progress;  // targets
  std::function<bool()> cancelled;
  // Processes sharing the documents; all return the same result. A rank claims a batch of documents when its last batch
  // is done: `claim` gives each number, from 0 on, to one rank. Without `claim` the ranks take batches in turn.
  Communicator* ranks = nullptr;
  std::function<int64_t()> claim;
};
constexpr int64_t kShorter = 4;
void check(const AdaptationOptions& o, const GptConfig& config);

struct AdaptedScore : Score {
  int64_t window_tokens = 0;  // tokens processed by the model
  int64_t updates = 0;
  // For consecutive steps of the same documents with only whole windows: their tokens, and the time between the losses
  // of the two steps. With several ranks the sums of both.
  int64_t whole_tokens = 0;
  double whole_seconds = 0;
};

// `documents`, when given, receives one entry per document of the source. With several ranks each rank returns all
// entries, and its listener receives the events of this rank's documents.
AdaptedScore score_adapted(const GptConfig& config, const GptWeights& weights, const Tokenizer& tokenizer,
                           std::shared_ptr<const TokenSource> source, const AdaptationOptions& options,
                           std::vector<DocumentScore>* documents = nullptr);

// Adapters trained on a whole text, for later use: `tokens`, including bos, if any, chunk by chunk and `passes` times.
struct Adapted {
  std::unique_ptr<DocumentAdapters> adapters;  // of a document, on the device of the weights
  double loss = 0;                             // mean of the first pass, where each chunk is scored before its step
  int64_t targets = 0, updates = 0;
};
Adapted adapt(const GptConfig& config, const GptWeights& weights, std::span<const int32_t> tokens,
              const AdaptationOptions& options, int64_t passes = 1);

}  // namespace ingot
