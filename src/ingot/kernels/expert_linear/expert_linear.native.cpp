// Part of libingot_bench.so (testing/native.h).
#include "ingot/kernels/expert_linear/expert_linear.h"

#include "ingot/testing/native.h"

namespace ingot::testing {

// y (R, N) of x (R, K) and w (E, N, K), in bf16.
EXPORT int ingot_bench_experts(void* x, void* w, void* offsets, void* y, int64_t rows, int64_t experts, int64_t n,
                               int64_t k, void* stream) {
  return guarded([&] {
    expert_linear({.x = Tensor(x, DType::bf16, {rows, k}, kGpu),
                   .w = Tensor(w, DType::bf16, {experts, n, k}, kGpu),
                   .offsets = Tensor(offsets, DType::i32, {experts + 1}, kGpu),
                   .y = Tensor(y, DType::bf16, {rows, n}, kGpu)},
                  {stream});
  });
}
// dx where w is given, dw where x is given.
EXPORT int ingot_bench_experts_backward(void* dy, void* x, void* w, void* offsets, void* dx, void* dw, int64_t rows,
                                        int64_t experts, int64_t n, int64_t k, void* stream) {
  return guarded([&] {
    const auto of = [&](void* at, Shape shape) { return at ? Tensor(at, DType::bf16, shape, kGpu) : Tensor(); };
    expert_linear_backward({.dy = of(dy, {rows, n}),
                            .x = of(x, {rows, k}),
                            .w = of(w, {experts, n, k}),
                            .offsets = Tensor(offsets, DType::i32, {experts + 1}, kGpu),
                            .dx = of(dx, {rows, k}),
                            .dw = of(dw, {experts, n, k}),
                            .overwrite = true},
                           {stream});
  });
}

}  // namespace ingot::testing
