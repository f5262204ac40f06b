#pragma once
// A model with the adapters of the documents that are adapted at once.
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "ingot/core/memory/memory.h"
#include "ingot/engines/train/device_batch.h"
#include "ingot/engines/ttt/document_windows.h"
#include "ingot/gpu/device.h"
#include "ingot/models/gpt/generate/device_weights.h"

namespace ingot::adaptation {

// The most documents side by side. `together` documents have whole windows; on a GPU there may be more shorter
// documents, with as many window tokens in all, if there is memory for their adapters.
int64_t most_documents(const GptConfig& config, const AdaptationOptions& o, const GptTypes& types, Device device,
                       int64_t together, int64_t tokens, int64_t longest);

// A model, and the adapters of the concurrent documents.
class Adaptation {
 public:
  // At most `documents` documents at once, with at most `tokens` window tokens in all.
  Adaptation(const GptConfig& config, const GptWeights& weights, const AdaptationOptions& options, int64_t documents,
             int64_t tokens, int64_t longest);
  Device device() const { return weights_.weights().master.device; }
  const LayerProgram& program() const { return model_.program(); }
  GptTypes types() const { return types_; }
  int64_t window_tokens() const { return window_tokens_; }

  // Runs chunk `ci` of the given documents, with adapters from `first` on (and a spare adapter after these). With
  // `learn` the gradients of the adapters are computed too. On a GPU the work is only put into the stream. The result
  // is the argument of losses_of(), which must be called within kTurns further calls.
  static constexpr size_t kTurns = 4;
  size_t chunk(int64_t ci, std::span<const DocumentSpan> spans, const TokenSource& source, DocumentAdapters& adapters,
               int64_t first, bool learn);
  // Waits for the losses of a chunk's targets and returns the losses, document by document.
  std::vector<double> losses_of(size_t turn);

 private:
  int64_t window(int64_t longest) const { return std::min(o_.window, longest); }

  // Fills in the windows that end with the chunk; positions count from 0 in each window. With a cache only the chunk
  // itself is filled in. The rest of the window is then run before the chunk if its keys must be those of the present
  // adapters.
  void fill_windows(int64_t ci, std::span<const DocumentSpan> spans, const TokenSource& source,
                    const DocumentAdapters& adapters, int64_t first, bool fill_up);

  FrozenWeights weights_;
  const AdaptationOptions& o_;
  GptTypes types_;
  int64_t spare_;  // sequence of the cache
  Gpt model_;
  DeviceBatch on_device_;
  Arena memory_, read_memory_;
  Tensor loss_, dloss_;
  struct Read {
    std::vector<int32_t> targets;
    Tensor losses;                     // in host memory
    std::unique_ptr<gpu::Event> done;  // on a GPU: when the losses have arrived
  };
  std::array<Read, kTurns> reads_;
  size_t turn_ = 0;
  Windows windows_, prefixes_;
  // Used by inexact adaptation only.
  std::unique_ptr<GptCache> cache_;
  std::unique_ptr<Gpt> prefix_;
  std::unique_ptr<DeviceBatch> prefix_on_device_;
  int64_t window_tokens_ = 0;
};

DocumentAdapters make_adapters(const Adaptation& a, const GptConfig& config, const AdaptationOptions& o,
                               int64_t documents);

}  // namespace ingot::adaptation
