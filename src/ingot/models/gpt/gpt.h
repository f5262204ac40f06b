#pragma once
// A small GPT: one forward for training, evaluation, adaptation and generation, and its explicit backward.
#include <memory>
#include <vector>

#include "ingot/models/gpt/call.h"
#include "ingot/models/gpt/config/parameters.h"
#include "ingot/models/gpt/config/program.h"
#include "ingot/models/gpt/generate/cache.h"

namespace ingot {

// A model bound to a capacity: everything it will need is planned and allocated here, nothing later.
class Gpt {
 public:
  // What a model takes of memory, without taking any.
  static int64_t planned_bytes(const GptConfig& config, const GptTypes& types, const GptOptions& options);

  Gpt(const GptConfig& config, const GptTypes& types, const GptOptions& options);
  ~Gpt();
  Gpt(Gpt&&) noexcept;

  const GptConfig& config() const;
  const LayerProgram& program() const;
  const GptOptions& options() const;
  int64_t arena_bytes() const;

  // Loss of each target (T), natural logarithm; 0 where the target is the ignore index -1. `inputs` is shown what
  // matrices are multiplied with.
  // With `cached` segments go on where cached sequences end, as for extend().
  void losses(const GptWeights& weights, const TokenBatch& batch, const Tensor& loss,
              const GptAdapters* adapters = nullptr, MatrixInputs* inputs = nullptr,
              const CachedSegments* cached = nullptr);

  // The same, and gradients of sum_t dloss[t] * loss[t]: accumulated into `grads` (flat, as weights; left out: base
  // weights are frozen and their products are skipped) and into `adapter_grads`. What is cached counts as constant.
  void losses_and_gradients(const GptWeights& weights, const TokenBatch& batch, const Tensor& dloss, const Tensor& loss,
                            const Tensor& grads, const GptAdapters* adapters = nullptr,
                            GptAdapters* adapter_grads = nullptr, const CachedSegments* cached = nullptr);

  // Logits after the softcap of the given rows: rows (N) i32 indices into the batch, in host memory, logits (N, V).
  void logits(const GptWeights& weights, const TokenBatch& batch, const Tensor& rows, const Tensor& logits,
              const GptAdapters* adapters = nullptr);

  // The same for tokens that continue cached sequences: segment s of the batch continues sequence sequences[s].
  // Positions must go on where the cache ends; the new keys are added to it.
  void extend(const GptWeights& weights, const TokenBatch& batch, const std::vector<int64_t>& sequences,
              GptCache& cache, const Tensor& rows, const Tensor& logits, const GptAdapters* adapters = nullptr);

  // One token of one sequence on a GPU, all that changes from token to token read there when the stream comes to it, so
  // that a graph of this call may be replayed: the batch's token and position, cached_cu (1, 2, 2) {{0, 1}, {0, n + 1}}
  // of the n tokens so far. Nothing is checked, and the cache is not told. logits (1, V), f32 too.
  void next(const GptWeights& weights, const TokenBatch& batch, int64_t sequence, GptCache& cache,
            const Tensor& cached_cu, const Tensor& logits, const GptAdapters* adapters = nullptr);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ingot
