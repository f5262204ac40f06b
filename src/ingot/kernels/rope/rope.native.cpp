// Part of libingot_bench.so (testing/native.h).
#include "ingot/kernels/rope/rope.h"

#include "ingot/kernels/rope/rope_config.h"
#include "ingot/testing/native.h"

namespace ingot::testing {

// --- rotations: x, y (tokens, heads, d) without gaps, tables (table_rows, half). config: null for the default, or
// {vectors, lanes, threads, iterations, overlap, evict_first, vectors a lane, early}.
namespace {
cuda::RopeTuning rope_tuning(const int* c) {
  return {.config = {.vectors = c[0] != 0, .lanes = c[1], .threads = c[2], .iterations = c[3], .per_lane = c[6]},
          .overlap = c[4] != 0,
          .evict_first = c[5],
          .early = c[7]};
}
template <class Op>
void add_table(Op& a, void* positions, void* cos, void* sin, int64_t tokens, int64_t half, int64_t table_rows) {
  a.positions = Tensor(positions, DType::i32, {tokens}, kGpu);
  a.cos = Tensor(cos, DType::f32, {table_rows, half}, kGpu);
  a.sin = Tensor(sin, DType::f32, {table_rows, half}, kGpu);
}
}  // namespace

EXPORT int ingot_bench_rope(const char* dtype, void* x, void* y, void* positions, void* cos, void* sin, int64_t tokens,
                            int64_t heads, int64_t d, int64_t half, int64_t table_rows, int64_t interleaved,
                            int64_t backward, const int* config, void* stream) {
  return guarded([&] {
    const Shape shape{tokens, heads, d};
    Rope a{.x = Tensor(x, dtype_named(dtype), shape, kGpu),
           .y = Tensor(y, dtype_named(dtype), shape, kGpu),
           .interleaved = interleaved != 0};
    add_table(a, positions, cos, sin, tokens, half, table_rows);
    const auto tuning = config != nullptr ? rope_tuning(config) : cuda::RopeTuning{};
    if (config != nullptr)
      backward ? cuda::rope_backward_with(a, tuning, {stream}) : cuda::rope_with(a, tuning, {stream});
    else
      backward ? rope_backward(a, {stream}) : rope(a, {stream});
  });
}

EXPORT int ingot_bench_qk_norm_rope(const char* dtype, void* x, void* y, void* positions, void* cos, void* sin,
                                    void* gain, int64_t tokens, int64_t heads, int64_t d, int64_t half,
                                    int64_t table_rows, double eps, const int* config, void* stream) {
  return guarded([&] {
    const Shape shape{tokens, heads, d};
    QkNormRope a{
        .x = Tensor(x, dtype_named(dtype), shape, kGpu), .y = Tensor(y, dtype_named(dtype), shape, kGpu), .eps = eps};
    add_table(a, positions, cos, sin, tokens, half, table_rows);
    a.gain = Tensor(gain, DType::f32, {heads}, kGpu);
    if (config != nullptr)
      cuda::qk_norm_rope_with(a, rope_tuning(config), {stream});
    else
      qk_norm_rope(a, {stream});
  });
}

EXPORT int ingot_bench_qk_norm_rope_workspace(int64_t tokens, int64_t heads, int64_t* bytes) {
  return guarded([&] { *bytes = qk_norm_rope_backward_workspace_bytes(tokens, heads, kGpu); });
}

EXPORT int ingot_bench_qk_norm_rope_backward(const char* dtype, void* x, void* dy, void* dx, void* positions, void* cos,
                                             void* sin, void* gain, void* dgain, void* workspace,
                                             int64_t workspace_bytes, int64_t tokens, int64_t heads, int64_t d,
                                             int64_t half, int64_t table_rows, double eps, const int* config,
                                             void* stream) {
  return guarded([&] {
    const Shape shape{tokens, heads, d};
    const DType t = dtype_named(dtype);
    QkNormRopeBackward a{
        .x = Tensor(x, t, shape, kGpu), .dy = Tensor(dy, t, shape, kGpu), .dx = Tensor(dx, t, shape, kGpu), .eps = eps};
    add_table(a, positions, cos, sin, tokens, half, table_rows);
    a.gain = Tensor(gain, DType::f32, {heads}, kGpu);
    if (dgain != nullptr)
      a.dgain = Tensor(dgain, DType::f32, {heads}, kGpu), a.workspace = raw(workspace, workspace_bytes);
    if (config != nullptr)
      cuda::qk_norm_rope_backward_with(a, rope_tuning(config), {stream});
    else
      qk_norm_rope_backward(a, {stream});
  });
}

}  // namespace ingot::testing
