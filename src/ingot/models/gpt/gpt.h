#pragma once
// A small GPT: one forward for training, evaluation, adaptation and generation, and its explicit backward.
#include <memory>
#include <vector>

#include "ingot/core/arena.h"
#include "ingot/kernels/linear/linear.h"
#include "ingot/models/gpt/parameters.h"
#include "ingot/models/gpt/program.h"

namespace ingot {

// Packed documents. All i32. positions count from 0 inside a segment; targets may be left out where no loss is wanted.
struct TokenBatch {
  Tensor tokens, targets, positions;  // (T)
  Tensor cu_seqlens;                  // (S + 1)
};

// Keys and values of every application for `sequences` sequences of up to `capacity` tokens.
class GptCache {
 public:
  GptCache(const GptConfig& config, const LayerProgram& program, int64_t sequences, int64_t capacity, DType dtype);
  int64_t sequences() const { return int64_t(lengths_.size()); }
  int64_t capacity() const { return capacity_; }
  int64_t length(int64_t sequence) const { return lengths_[size_t(sequence)]; }
  void truncate(int64_t sequence, int64_t length);  // forgets tokens beyond `length`
  void advance(int64_t sequence, int64_t tokens);   // after every application has written them
  const Tensor& keys(int application) const { return k_[size_t(application)]; }
  const Tensor& values(int application) const { return v_[size_t(application)]; }

 private:
  Arena arena_;
  int64_t capacity_;
  std::vector<Tensor> k_, v_;  // per application (sequences * capacity, Hkv, D)
  std::vector<int64_t> lengths_;
};

// Low-rank adapters, one set per document (segment) and application:  delta(x) = (x A^T) B^T.
struct AdapterPair {
  Tensor a, b;
};  // (S, R, in), (S, out, R); empty: none
struct ApplicationAdapters {
  AdapterPair q, k, v, o, mlp;
};  // o reads the block's normed input, mlp bypasses the MLP
struct GptAdapters {
  std::vector<ApplicationAdapters> applications;
  AdapterPair head;  // added to the logits before the softcap
};

struct GptOptions {
  int64_t capacity = 0;   // most tokens of one call
  bool looping = false;   // which of the two layer programs
  bool training = false;  // keeps what the backward pass needs
  Products products = Products::fp32;
  int64_t max_adapter_rank = 0;  // largest rank of the adapters passed later; 0: none
  int64_t max_positions = 0;     // rotary positions that may occur; 0: the config's context
};

// A model bound to a capacity: everything it will need is planned and allocated here, nothing later.
class Gpt {
 public:
  Gpt(const GptConfig& config, DType dtype, const GptOptions& options);
  ~Gpt();
  Gpt(Gpt&&) noexcept;

  const GptConfig& config() const;
  const LayerProgram& program() const;
  const GptOptions& options() const;
  int64_t arena_bytes() const;

  // Loss of each target (T), natural logarithm; 0 where the target is the ignore index -1.
  void losses(const Tensor& weights, const TokenBatch& batch, const Tensor& loss,
              const GptAdapters* adapters = nullptr);

  // The same, and gradients of sum_t dloss[t] * loss[t]: accumulated into `grads` (flat, as weights; left out: base
  // weights are frozen and their products are skipped) and into `adapter_grads`.
  void losses_and_gradients(const Tensor& weights, const TokenBatch& batch, const Tensor& dloss, const Tensor& loss,
                            const Tensor& grads, const GptAdapters* adapters = nullptr,
                            GptAdapters* adapter_grads = nullptr);

  // Logits after the softcap of the given rows: rows (N) i32 indices into the batch, logits (N, V).
  void logits(const Tensor& weights, const TokenBatch& batch, const Tensor& rows, const Tensor& logits,
              const GptAdapters* adapters = nullptr);

  // The same for tokens that continue cached sequences: segment s of the batch continues sequence sequences[s].
  // Positions must go on where the cache ends; the new keys are added to it.
  void extend(const Tensor& weights, const TokenBatch& batch, const std::vector<int64_t>& sequences, GptCache& cache,
              const Tensor& rows, const Tensor& logits, const GptAdapters* adapters = nullptr);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ingot
