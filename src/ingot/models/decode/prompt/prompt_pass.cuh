#pragma once
// One pass of the prompt path: its operands and sizes, which its norms (pass_norms.cuh), its attention
// (pass_attention.cuh) and its MLPs (pass_mlp.cuh) share, and its products with one matrix.
#include <algorithm>
#include <span>

#include "ingot/gpu/device_limits.h"
#include "ingot/gpu/launch.h"
#include "ingot/kernels/grouped/grouped.h"
#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/models/decode/batch/batch_linear.h"
#include "ingot/models/decode/batch/batch_router.cuh"
#include "ingot/models/decode/phased/vector_stages.h"
#include "ingot/models/decode/prompt/prompt.h"
#include "ingot/models/decode/prompt/prompt_block.cuh"

namespace ingot::decode::prompts {

// The emulator has no kernels for products and attention. Tests on the CPU provide replacements
// (prompt.emulated.test.cpp).
#if defined(INGOT_EMULATE) && !defined(INGOT_EMULATED_DEVICE)
#define INGOT_PROMPTS_ON_HOST
#endif

inline int64_t leading_single_tokens(std::span<const PromptPart> parts) {
  return std::find_if(parts.begin(), parts.end(), [](const PromptPart& part) { return part.T > 1; }) - parts.begin();
}

struct PromptPass {
  const Model& m;
  const PromptBuffers& b;
  const Prompt& p;
  std::span<const PromptPart> parts;  // empty in a step of sequences
  Stream stream;
  const Ranks& ranks;
  const DecoderSpec& c = m.config;
  int64_t S = p.T * bank_choices(c), stride = weight_tile_padded_cols(c.hidden);
  // The heads that this GPU computes, and the widths of their queries and keys.
  int64_t kv_heads = m.kv_heads < 0 ? c.kv_heads : m.kv_heads, heads = kv_heads * (c.heads / c.kv_heads);
  int64_t q_width = heads * c.head_dim, kv_width = kv_heads * c.head_dim;
  // The first rows that attend as a step of sequences does: all rows of a step, or the leading parts of one token.
  int64_t step_rows = parts.empty() ? p.T : p.sequences == nullptr ? 0 : leading_single_tokens(parts);
  // In a step, output is too small for all multiprocessors, so K is divided in two; b.down has room for both halves.
  bool output_in_halves = parts.empty() && p.T <= int64_t(kMostSequences) && c.experts_per_token >= 2 &&
                          q_width > 3 * kWeightTileCols && !adds_later() && grouped_takes_parts(device());
  // In a step, one kernel of clusters computes the norm, the router and the choice of experts between output and the
  // experts' products, and for at most kRouted rows it also gathers the rows of the experts.
  bool routes_by_cluster =
      parts.empty() && p.T <= int64_t(kMostSequences) && !adds_later() && gpu::device_limits(device()).hopper &&
      takes_route_rows(uint32_t(c.hidden), uint32_t(stride), uint32_t(c.experts), uint32_t(bank_choices(c)));

#ifdef INGOT_PROMPTS_ON_HOST
  Device device() const { return {}; }
#else
  Device device() const { return {Device::cuda, p.device}; }
#endif
  // As Plan::adds_later().
  bool adds_later() const { return ranks.several() || c.norm.post; }

  template <class Kernel, class P>
  void launch(const char* name, Kernel kernel, int64_t grid, const P& params, int64_t threads = kThreads) const {
    gpu::launch(name, kernel, {.grid = grid, .block = threads, .overlap = true, .device = p.device}, stream, params);
  }
  Tensor matrix(void* data, DType t, int64_t rows, int64_t cols, int64_t row_stride) const {
    Tensor y(data, t, {rows, cols}, device());
    y.stride[0] = row_stride;
    return y;
  }
  Tensor normed(int64_t rows) const { return matrix(b.normed, DType::bf16, rows, c.hidden, stride); }
  Norm norm_of(const float* weight) const {
    return {
        .x = b.x, .y = b.normed, .stride = stride, .weight = weight, .C = uint32_t(c.hidden), .eps = float(c.norm.eps)};
  }

  // `offsets`: {0, rows} in device memory; null: all rows.
  void product(const Matrix& w, const float* bias, const Tensor& x, const Tensor& y, bool add = false,
               const int32_t* offsets = nullptr) const {
    dense({.x = x,
           .w = w.data,
           .format = w.format,
           .groups = 1,
           .n = w.rows,
           .bias = bias,
           .offsets = offsets != nullptr ? offsets : b.whole,
           .y = y,
           .add = add});
  }
  // Adds to the residual stream, or writes this pass's part of a sum (PromptBuffers::part) that a later kernel adds.
  void product_into_residual(const Matrix& w, const float* bias, const Tensor& x, int which) const {
    product(w, bias, x, matrix(adds_later() ? b.part[which] : b.x, DType::f32, p.T, c.hidden, stride), !adds_later());
  }
  void dense(const GroupedLinear& a) const {
#ifndef INGOT_EMULATE
    if (parts.empty() && takes_batch_linear(a)) return batch_linear(a, stream);
#endif
    grouped_linear(a, stream);
  }
};

}  // namespace ingot::decode::prompts
