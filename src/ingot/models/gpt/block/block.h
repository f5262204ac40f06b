#pragma once
// One application of one block, forward and backward: the only implementation there is. Training, evaluation,
// adaptation and generation all run it.
#include <algorithm>

#include "ingot/models/gpt/buffers.h"
#include "ingot/models/gpt/call.h"
#include "ingot/models/gpt/generate/cache.h"

namespace ingot::detail {

// A layer's parameters as views into a flat tensor; all empty when the flat tensor is (frozen gradients).
struct LayerViews {
  Tensor attn_norm, mlp_norm, q, k, v, o, up, down, q_gain, attn_scale, mlp_scale, mix_a, mix_b;
  Tensor kv, qkv;                // k and v, and with q, as one matrix, where they lie together
  Tensor lane_post, lane_resid;  // (2, 2), (2)
};
struct SkipViews {
  Tensor weight, gate;
};

// What all blocks of one call share.
struct CallContext {
  int64_t scored() const { return scored_cu.empty() ? 0 : scored_cu.back(); }
  int64_t rows_out() const { return cut ? scored() : tokens; }  // of the last application

  const GptConfig& config;
  int64_t tokens;
  int64_t block_rows;  // at most so many tokens at a time where each is worked on by itself
  Device device;
  Stream stream;
  Tensor positions, cu_seqlens;                // i32, on the device
  std::span<const int32_t> cu;                 // cu_seqlens in host memory
  std::span<const int32_t> scored_cu;          // the same of the tokens that are scored; cu where all are
  bool cut = false;                            // the last application's output has rows of the scored tokens alone
  Tensor scored_positions, scored_cu_seqlens;  // of these tokens, on the device; where it is cut
  Tensor cos, sin;                             // empty without rotation
  Act act;
  Products products;
  bool any_order = false;   // of what attention's backward pass adds up
  Tensor linear_workspace;  // of whatever product is running
  const GptAdapters* adapters = nullptr;
  GptAdapters* adapter_grads = nullptr;
  MatrixInputs* inputs = nullptr;          // of a forward pass alone
  const CachedSegments* cached = nullptr;  // keys and values of this application live in a cache
  Tensor cache_at;   // (1) i32, on the device: where the only sequence goes on, where that is not known to the host
  Tensor cached_cu;  // (S, 2, 2) i32, on the device: of segment s (0, its tokens) and (0, the keys that are seen)
};

struct BlockTensors {
  int index = 0;  // application
  const Application* application = nullptr;
  LayerViews w, dw;
  SkipViews skip_w, skip_dw;
  Tensor skip;  // the encoder output that is merged, or empty
  Tensor in0, in1, x0, out0, out1;
  Saved saved;
  Scratch scratch;
  const ScoredRows* scored = nullptr;  // of the last application where it is cut
};

void block_forward(const CallContext& call, const BlockTensors& b);

// g0, g1: gradients of the outputs in, of the inputs out (in place; a cut application's outputs have fewer rows).
// x0_grad is accumulated, skip_grad written: an output is merged once.
struct BlockGradients {
  Tensor g0, g1, x0_grad, skip_grad;
  bool of_input = true;  // false: nobody reads the gradient of what the application read
};
void block_backward(const CallContext& call, const BlockTensors& b, const BlockGradients& g);

// Keys that segment s sees, with those of its `added` tokens.
inline int64_t cached_keys(const CachedSegments& cached, size_t s, int64_t added) {
  const int64_t all = cached.cache.length(cached.sequences[s]) + added;
  return cached.window > 0 ? std::min(all, cached.window) : all;
}

// A contiguous tensor's memory seen as the first rows it needs for another shape.
inline Tensor view(const Tensor& t, Shape shape) { return Tensor(t.data, t.dtype, shape, t.device); }

}  // namespace ingot::detail
