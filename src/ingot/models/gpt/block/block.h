#pragma once
// A layer call of a block, forward and backward. Training, evaluation, adaptation and generation all use this
// implementation.
#include <algorithm>

#include "ingot/models/gpt/buffers.h"
#include "ingot/models/gpt/call.h"
#include "ingot/models/gpt/generate/cache.h"

namespace ingot::detail {

// A layer's parameters as views into a flat tensor; all are empty when the flat tensor is empty (frozen gradients).
struct LayerViews {
  Tensor attn_norm, mlp_norm, q, k, v, o, up, down, q_gain, attn_scale, mlp_scale, mix_a, mix_b;
  Tensor kv, qkv;                // k and v, and q, k and v, as a single matrix where adjacent
  Tensor lane_post, lane_resid;  // (2, 2), (2)
};
struct SkipViews {
  Tensor weight, gate;
};

// The common arguments of all blocks of a call.
struct CallContext {
  int64_t scored() const { return scored_cu.empty() ? 0 : scored_cu.back(); }
  int64_t rows_out() const { return cut ? scored() : tokens; }  // rows of the last layer call's output

  const GptConfig& config;
  int64_t tokens;
  int64_t block_rows;  // the most tokens at a time in operations on single tokens
  Device device;
  Stream stream;
  Tensor positions, cu_seqlens;                // i32, on the device
  std::span<const int32_t> cu;                 // cu_seqlens in host memory
  std::span<const int32_t> scored_cu;          // the same for the scored tokens; equal to cu where all are scored
  bool cut = false;                            // the last layer call's output has only the scored tokens' rows
  Tensor scored_positions, scored_cu_seqlens;  // of these tokens, on the device; only where the output is cut
  Tensor cos, sin;                             // empty without rotation
  Act act;
  Products products;
  bool folds_scales = false;  // scales of branches are folded into matrices (BlockTensors::scaled)
  bool any_order = false;     // workspace for the sums of attention's backward pass
  Tensor linear_workspace;    // workspace of the current product
  const GptAdapters* adapters = nullptr;
  GptAdapters* adapter_grads = nullptr;
  MatrixInputs* inputs = nullptr;          // receives the inputs of products in a forward pass without a backward pass
  const CachedSegments* cached = nullptr;  // keys and values of this layer call live in a cache
  Tensor cache_at;   // (1) i32, on the device: the next position of the only sequence, where unknown to the host
  Tensor cached_cu;  // (S, 2, 2) i32, on the device: for segment s (0, its tokens) and (0, its visible keys)
};

struct BlockTensors {
  int index = 0;  // the number of the layer call
  const LayerCall* layer_call = nullptr;
  LayerViews w, dw;
  SkipViews skip_w, skip_dw;
  Tensor skip;  // the encoder output merged into the stream, or empty
  Tensor in0, in1, x0, out0, out1;
  Saved saved;
  Scratch scratch;
  const ScoredRows* scored = nullptr;      // of the last layer call where its output is cut
  const ScaledMatrices* scaled = nullptr;  // where the scales of the branches are folded into their matrices
};

void block_forward(const CallContext& call, const BlockTensors& b);

// On entry g0 and g1 contain the gradients of the layer call's outputs, on return those of its inputs (in place; the
// outputs of a cut layer call have fewer rows). x0_grad is accumulated; skip_grad is written, because an output is
// merged only once.
struct BlockGradients {
  Tensor g0, g1, x0_grad, skip_grad;
  Tensor more;  // added to g0 on return, or left out: the gradient of a skip from the layer call's input; not in lanes
  bool of_input = true;  // false: the gradient of the layer call's inputs is not needed
};
void block_backward(const CallContext& call, const BlockTensors& b, const BlockGradients& g);

// The visible keys of segment s, including those of its `added` tokens.
inline int64_t cached_keys(const CachedSegments& cached, size_t s, int64_t added) {
  const int64_t all = cached.cache.length(cached.sequences[s]) + added;
  return cached.window > 0 ? std::min(all, cached.window) : all;
}

// A contiguous tensor's memory viewed as another, smaller shape.
inline Tensor view(const Tensor& t, Shape shape) { return Tensor(t.data, t.dtype, shape, t.device); }

}  // namespace ingot::detail
