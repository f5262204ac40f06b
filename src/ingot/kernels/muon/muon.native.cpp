// Part of libingot_bench.so (testing/native.h).
#include "ingot/kernels/muon/muon.h"

#include <algorithm>

#include "ingot/gpu/device.h"
#include "ingot/gpu/gemm/variant.h"
#include "ingot/kernels/muon/newton_schulz.h"
#include "ingot/testing/native.h"

namespace ingot::testing {

namespace {
Coefficients coefficients(int64_t steps) { return {int(steps), 3.4445, -4.7750, 2.0315}; }
}  // namespace

// --- Muon on a bank of f32 parameters, bf16 products
EXPORT int ingot_bench_muon_workspace(int64_t count, int64_t rows, int64_t cols, int64_t* bytes) {
  return guarded([&] { *bytes = muon_workspace_bytes(count, rows, cols, DType::f32, kGpu); });
}
EXPORT int ingot_bench_muon(void* p, void* g, void* momentum, int64_t count, int64_t rows, int64_t cols, double lr,
                            double mu, int64_t steps, void* workspace, int64_t workspace_bytes, void* stream) {
  return guarded([&] {
    const auto of = [&](void* at) { return Tensor(at, DType::f32, {count, rows, cols}, kGpu); };
    muon({.p = of(p),
          .g = of(g),
          .momentum = of(momentum),
          .workspace = raw(workspace, workspace_bytes),
          .lr = lr,
          .mu = mu,
          .steps = int(steps),
          .products = Products::bf16},
         {stream});
  });
}
// Newton-Schulz alone on a bank of f16, `scale` times as large as the matrices: x and its partner `other`, and
// `squares`, five of its matrices of the shorter side. *in_other: the result is in `other`.
EXPORT int ingot_bench_newton_schulz_scale(int64_t steps, double* scale) {
  return guarded([&] { *scale = cuda::iteration_scale("newton_schulz", coefficients(steps)); });
}
EXPORT int ingot_bench_newton_schulz(void* x, void* other, void* squares, int64_t count, int64_t rows, int64_t cols,
                                     int64_t steps, int64_t* in_other, void* stream) {
  return guarded([&] {
    const int64_t side = std::min(rows, cols);
    const auto of = [&](void* p, int64_t r, int64_t c) { return Tensor(p, DType::f16, {count, r, c}, kGpu); };
    const Coefficients co = coefficients(steps);
    cuda::IterationBank bank{
        .x = of(x, rows, cols), .other = of(other, rows, cols), .scale = cuda::iteration_scale("newton_schulz", co)};
    for (int64_t i = 0; i < squares_of(rows, cols); ++i)
      bank.square[size_t(i)] = of(static_cast<f16*>(squares) + i * count * side * side, side, side);
    Tensor result;
    gemm::with_core(gpu::current_device(), [&](auto core) {
      result = cuda::launch_iteration<typename decltype(core)::type>(bank, co, {stream});
    });
    *in_other = result.data == other;
  });
}

}  // namespace ingot::testing
