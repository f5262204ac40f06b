// Part of libingot_bench.so (testing/native.h).
#include "ingot/kernels/muon/muon.h"

#include <algorithm>
#include <utility>

#include "ingot/gpu/device.h"
#include "ingot/gpu/gemm/variant.h"
#include "ingot/kernels/muon/newton_schulz.h"
#include "ingot/testing/native.h"

namespace ingot::testing {

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
// Newton-Schulz alone on a bank of bf16; the result is in x where `steps` is even, otherwise in `other`.
EXPORT int ingot_bench_newton_schulz(void* x, void* other, void* square, void* polynomial, int64_t count, int64_t rows,
                                     int64_t cols, int64_t steps, void* stream) {
  return guarded([&] {
    const int64_t side = std::min(rows, cols);
    const auto of = [&](void* p, int64_t r, int64_t c) { return Tensor(p, DType::bf16, {count, r, c}, kGpu); };
    cuda::IterationBank bank{.x = of(x, rows, cols),
                             .other = of(other, rows, cols),
                             .square = of(square, side, side),
                             .polynomial = of(polynomial, side, side),
                             .a = 3.4445,
                             .b = -4.7750,
                             .c = 2.0315};
    for (int64_t step = 0; step < steps; ++step) {
      gemm::with_core(gpu::current_device(),
                      [&](auto core) { cuda::launch_iteration<typename decltype(core)::type, bf16>(bank, {stream}); });
      std::swap(bank.x, bank.other);
    }
  });
}

}  // namespace ingot::testing
