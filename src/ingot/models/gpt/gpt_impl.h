#pragma once
// The inside of a Gpt: its memory and the parts of its passes, each in a file of its own.
#include <cstdint>
#include <span>
#include <vector>

#include "ingot/core/memory/arena.h"
#include "ingot/kernels/activation/activation.h"
#include "ingot/kernels/cross_entropy/cross_entropy.h"
#include "ingot/models/gpt/block/block.h"
#include "ingot/models/gpt/buffers.h"
#include "ingot/models/gpt/gpt.h"
#include "ingot/models/gpt/parameter_roles.h"

namespace ingot {

struct Gpt::Impl {
  GptConfig config;
  GptTypes types;
  GptOptions options;
  LayerProgram program;
  ParameterLayout layout;
  detail::ParameterRoles roles;
  detail::Buffers buffers;
  Arena table_memory;
  Tensor cos, sin;
  // Of the latest call:
  std::vector<int32_t> scored_cu;  // cu_seqlens of the scored tokens
  std::vector<int32_t> cached_cu;  // of cached sequences, on the host
  Arena cached_cu_memory;          // on a GPU
  std::vector<int32_t> scored_at;  // the scored tokens' positions, and their cu_seqlens
  Arena scored_at_memory;          // on a GPU
  Act act;

  Impl(const GptConfig& c, const GptTypes& t, const GptOptions& o);
  void make_rope_table();

  // gpt_checks.cpp
  void check_types() const;
  void check_call(const GptWeights& weights, const TokenBatch& batch, bool needs_targets) const;
  void check_on_host(const TokenBatch& batch) const;
  void check_adapters(const TokenBatch& batch, const GptAdapters* adapters) const;
  void check_cached(const TokenBatch& batch, const CachedSegments& cached) const;

  // gpt_context.cpp
  detail::CallContext context(const TokenBatch& batch, const GptAdapters* adapters, GptAdapters* grads);
  void cut_last_call(detail::CallContext& call, const TokenBatch& batch);
  void continue_sequences(detail::CallContext& call, const CachedSegments* cached);
  Tensor cached_offsets(std::span<const int32_t> cu, const CachedSegments& cached);
  void advance_caches(const detail::CallContext& call);

  // gpt_embedding.cpp
  int64_t embed_width() const { return roles.embed_proj != nullptr ? config.embed_dim : config.dim; }
  Tensor look_up(const GptWeights& weights, const TokenBatch& batch, const Tensor& raw, const Tensor& into) const;
  void embed_forward(const GptWeights& weights, const TokenBatch& batch, MatrixInputs* inputs = nullptr);
  void embed_backward(const GptWeights& weights, const TokenBatch& batch, const Tensor& grads);

  // gpt_blocks.cpp
  detail::BlockTensors block(int i, const GptWeights& weights, const Tensor& grads, bool backward) const;
  void scale_matrices(const GptWeights& weights);
  void scale_matrices_backward(const GptWeights& weights, const Tensor& grads);
  void blocks_forward(const detail::CallContext& call, const GptWeights& weights);
  void blocks_backward(const detail::CallContext& call, const GptWeights& weights, const Tensor& grads);
  bool adds_skip(int i) const;

  // gpt_head.cpp
  Tensor block_output(int64_t tokens);
  Tensor scored_rows(const detail::CallContext& call);
  void head_losses(const detail::CallContext& call, const GptWeights& weights, const TokenBatch& batch,
                   const Tensor& dloss, const Tensor& loss, const Tensor& grads, bool backward);
  void losses_per_segment(LinearCrossEntropy ce, const detail::CallContext& call);
  void head_backward(const detail::CallContext& call, const GptWeights& weights, const Tensor& grads, const Tensor& x);
  void head_logits(const detail::CallContext& call, const GptWeights& weights, const Tensor& rows,
                   const Tensor& logits);
};

}  // namespace ingot
