#pragma once
// The arguments of a model: the options of its construction, and the arguments of a call.
#include <numeric>
#include <span>
#include <vector>

#include "ingot/core/memory/allocator.h"
#include "ingot/core/tensor.h"
#include "ingot/kernels/linear/linear.h"

namespace ingot {

// Element types of a model. On the CPU all are the same, f32 or f64.
struct GptTypes {
  GptTypes() = default;
  GptTypes(DType all) : master(all), compute(all), activations(all) {}
  GptTypes(DType m, DType c, DType a) : master(m), compute(c), activations(a) {}
  DType master = DType::f32;       // the trained weights, and gradients
  DType compute = DType::f32;      // the weights in matrix products
  DType activations = DType::f32;  // activations, and their gradients
  // Losses and statistics of rows.
  DType sums() const { return activations == DType::f64 ? DType::f64 : DType::f32; }
};
// The types for training on a device: f32 on a CPU; on a GPU bf16 activations and bf16 copies of f32 weights.
GptTypes gpt_types(Device device);

// Flat weights (ParameterLayout). `compute` is the copy for products where their type differs from master's; vectors
// and scalars are always read from `master`. `qkv`, for weights without gradients: a second copy of each layer's q, k
// and v, stacked (layers, (H + 2 Hkv) D, C), so that a single product replaces two.
struct GptWeights {
  GptWeights(const Tensor& m, const Tensor& c = {}) : master(m), compute(c) {}
  Tensor master, compute, qkv;
};

// The types of a model with such weights.
inline GptTypes types_of(const GptWeights& w) {
  const DType compute = w.compute ? w.compute.dtype : w.master.dtype;
  return {w.master.dtype, compute, compute};
}

// The options of a model, fixed at its construction.
struct GptOptions {
  int64_t capacity = 0;   // most tokens of a call
  bool looping = false;   // the second of the two layer programs
  bool training = false;  // keeps the inputs of the backward pass
  // Training on a GPU: the backward pass recomputes no rows of the forward pass; more memory, the same bits.
  bool keep_rows = false;
  Products products = Products::fp32;
  int64_t max_adapter_rank = 0;  // largest rank of the adapters passed later; 0: none
  // The number of documents of a call whose adapters of q, k and v may be folded into separate weights, W + B A in the
  // products' type, where folding is less work; 0: none.
  int64_t most_folded = 0;
  int64_t most_scored = 0;  // most scored tokens of a call; 0: the capacity, without TokenBatch::last
  // With keep_rows and base weights without gradients: for tokens without a score, the last layer call ends after their
  // keys and values.
  bool cut_last = false;
  // Training on a GPU, where not 0: attention adds the queries' gradients in any order, which is faster; their last
  // bits may then differ from call to call. The value is the most segments of a call, including empty segments.
  int64_t any_order_segments = 0;
  int64_t most_keys = 0;        // most keys of a segment in training, including cached keys; 0: no cache
  int64_t max_positions = 0;    // number of rotary positions; 0: the config's context
  Device device;                // the device of weights, batches, losses and logits
  Stream stream;                // the stream of all of the model's work
  Allocator* memory = nullptr;  // for activations; null: the device's allocator
};

// Packed documents. All i32. positions count from 0 inside a segment; targets may be left out if no loss is wanted.
struct TokenBatch {
  Tensor tokens, targets, positions;  // (T)
  Tensor cu_seqlens;                  // (S + 1)
  // The same numbers in host memory, for decisions on the host: the segments, the number of tokens, the length of a
  // cache. Left out where the batch itself lies in host memory.
  Tensor host_positions, host_cu_seqlens;
  // The number of scored tokens at each segment's end (S, in host memory); left out: all tokens. Targets, losses and
  // their gradients then belong to the scored tokens alone, segment by segment, and the head computes only their rows.
  std::span<const int32_t> last;

  const Tensor& positions_on_host() const { return host_positions ? host_positions : positions; }
  const Tensor& cu_on_host() const { return host_cu_seqlens ? host_cu_seqlens : cu_seqlens; }
  // Segment s is tokens [cu()[s], cu()[s + 1]).
  std::span<const int32_t> cu() const { return {cu_on_host().ptr<int32_t>(), size_t(cu_on_host().numel())}; }
  int64_t scored() const {
    return last.empty() ? tokens.numel() : std::accumulate(last.begin(), last.end(), int64_t(0));
  }
};

// The inputs of a forward pass's matrix products. q, k and v have the same rows; a tied embedding is the head.
enum class MatrixInput { embed_proj, attention, attention_output, mlp_up, mlp_down, head_proj, head };
// Receives the input rows of matrix products: once or several times per layer call, all tokens in total.
class MatrixInputs {
 public:
  virtual ~MatrixInputs() = default;
  // x (N, K) on the model's device, to be read by work on the model's stream before the call returns. `layer`: for the
  // four kinds of matrices in blocks, otherwise 0.
  virtual void seen(MatrixInput which, int layer, const Tensor& x) = 0;
};

// Low-rank adapters, one set per document (segment) and layer call:  delta(x) = (x A^T) B^T.
struct AdapterPair {
  Tensor a, b;
};  // (S, R, in), (S, out, R); empty: none
struct LayerCallAdapters {
  AdapterPair q, k, v, o, mlp;
};                                              // o reads the block's normed input, mlp bypasses the MLP
using ApplicationAdapters = LayerCallAdapters;  // the earlier name, for one version
struct GptAdapters {
  std::vector<LayerCallAdapters> layer_calls;
  AdapterPair head;      // added to the logits before the softcap
  bool written = false;  // as gradients: the gradients of scored segments are written, not added to
};

}  // namespace ingot
