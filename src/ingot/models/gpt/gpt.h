#pragma once
// A small GPT: a single forward pass for training, evaluation, adaptation and generation, and its explicit backward
// pass.
#include <memory>
#include <vector>

#include "ingot/models/gpt/call.h"
#include "ingot/models/gpt/config/parameters.h"
#include "ingot/models/gpt/config/program.h"
#include "ingot/models/gpt/generate/cache.h"

namespace ingot {

// A model with a fixed capacity: all memory is planned and allocated on construction, none later.
class Gpt {
 public:
  // The bytes of a model's memory, without an allocation.
  static int64_t planned_bytes(const GptConfig& config, const GptTypes& types, const GptOptions& options);

  Gpt(const GptConfig& config, const GptTypes& types, const GptOptions& options);
  ~Gpt();
  Gpt(Gpt&&) noexcept;

  const GptConfig& config() const;
  const LayerProgram& program() const;
  const GptOptions& options() const;
  int64_t arena_bytes() const;

  // The loss of each target (T), natural logarithm; 0 where the target is the ignore index -1. `inputs` receives the
  // inputs of the matrix products. With `cached` the segments continue cached sequences, as for extend().
  void losses(const GptWeights& weights, const TokenBatch& batch, const Tensor& loss,
              const GptAdapters* adapters = nullptr, MatrixInputs* inputs = nullptr,
              const CachedSegments* cached = nullptr);

  // The same, and gradients of sum_t dloss[t] * loss[t], accumulated into `grads` (flat, as weights; left out: base
  // weights are frozen and their products are skipped) and into `adapter_grads`. Cached keys and values count as
  // constants.
  void losses_and_gradients(const GptWeights& weights, const TokenBatch& batch, const Tensor& dloss, const Tensor& loss,
                            const Tensor& grads, const GptAdapters* adapters = nullptr,
                            GptAdapters* adapter_grads = nullptr, const CachedSegments* cached = nullptr);

  // Logits after the softcap. `rows` (N) i32, in host memory, holds indices into the batch, and `logits` is (N, V).
  void logits(const GptWeights& weights, const TokenBatch& batch, const Tensor& rows, const Tensor& logits,
              const GptAdapters* adapters = nullptr);

  // The same for tokens after cached sequences: segment s of the batch continues sequence sequences[s]. Positions must
  // continue at the end of the cached sequence; the new keys are added to the cache.
  void extend(const GptWeights& weights, const TokenBatch& batch, const std::vector<int64_t>& sequences,
              GptCache& cache, const Tensor& rows, const Tensor& logits, const GptAdapters* adapters = nullptr);

  // A token of a sequence on a GPU. All inputs that change from token to token are read from device memory when the
  // stream reaches the call, so a graph of this call may be replayed: the batch's token and position, and cached_cu (1,
  // 2, 2) {{0, 1}, {0, n + 1}} for the n tokens so far. The call checks nothing and does not update the cache's length.
  // logits (1, V), f32 too.
  void next(const GptWeights& weights, const TokenBatch& batch, int64_t sequence, GptCache& cache,
            const Tensor& cached_cu, const Tensor& logits, const GptAdapters* adapters = nullptr);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ingot
