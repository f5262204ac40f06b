// Functions of libingot_bench.so (testing/native.h).
#include "ingot/kernels/attention/attention.h"

#include <cmath>

#include "ingot/testing/native.h"

namespace ingot::testing {

// --- attention over packed segments. form of the backward pass: 1 in any order; 2, or 3 with both, where all segments
// have the same length.
EXPORT int ingot_bench_attention_workspace(int64_t segments, int64_t tokens, int64_t heads, int64_t kv_heads,
                                           int64_t width, int64_t form, int64_t* bytes) {
  return guarded([&] {
    const Tensor q(nullptr, DType::bf16, {tokens, heads, width}, kGpu);
    const Tensor k(nullptr, DType::bf16, {tokens, kv_heads, width}, kGpu);
    *bytes = attention_backward_workspace_bytes({.q = q,
                                                 .k = k,
                                                 .v = k,
                                                 .cu_q = Tensor(nullptr, DType::i32, {segments + 1}, kGpu),
                                                 .deterministic = form % 2 == 0,
                                                 .regular = form >= 2});
  });
}
// --- q, out and dout (tokens, heads, width), k and v (tokens, kv_heads, width), the
// scale 1 / sqrt(width), causal. Backward where dout is not null.
EXPORT int ingot_bench_attention(void* q, void* k, void* v, void* cu, int64_t segments, void* out, void* lse,
                                 void* dout, void* dq, void* dk, void* dv, void* workspace, int64_t tokens,
                                 int64_t heads, int64_t kv_heads, int64_t width, int64_t form, void* stream) {
  return guarded([&] {
    const auto of = [&](void* p, int64_t h) { return Tensor(p, DType::bf16, {tokens, h, width}, kGpu); };
    const Tensor offsets(cu, DType::i32, {segments + 1}, kGpu), sums(lse, DType::f32, {heads, tokens}, kGpu);
    const double scale = 1 / std::sqrt(double(width));
    if (dout == nullptr)
      return attention({.q = of(q, heads),
                        .k = of(k, kv_heads),
                        .v = of(v, kv_heads),
                        .cu_q = offsets,
                        .out = of(out, heads),
                        .lse = sums,
                        .scale = scale},
                       {stream});
    AttentionBackward a{.q = of(q, heads),
                        .k = of(k, kv_heads),
                        .v = of(v, kv_heads),
                        .cu_q = offsets,
                        .out = of(out, heads),
                        .lse = sums,
                        .dout = of(dout, heads),
                        .dq = of(dq, heads),
                        .dk = of(dk, kv_heads),
                        .dv = of(dv, kv_heads),
                        .scale = scale,
                        .deterministic = form % 2 == 0,
                        .regular = form >= 2};
    a.workspace = raw(workspace, attention_backward_workspace_bytes(a));
    attention_backward(a, {stream});
  });
}

}  // namespace ingot::testing
