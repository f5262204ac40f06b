// Part of libingot_bench.so (testing/native.h).
#include "ingot/kernels/linear/linear.h"

#include "ingot/testing/native.h"

namespace ingot::testing {

// c (m, n) = op(a) op(b), or c += in fp32.
EXPORT int ingot_bench_matmul(void* a, void* b, void* c, int64_t m, int64_t n, int64_t k, int64_t transpose_a,
                              int64_t transpose_b, int64_t adds, void* workspace, int64_t workspace_bytes,
                              void* stream) {
  return guarded([&] {
    const Device device = kGpu;
    const Shape of_a = transpose_a ? Shape{k, m} : Shape{m, k}, of_b = transpose_b ? Shape{n, k} : Shape{k, n};
    matmul({.a = Tensor(a, DType::bf16, of_a, device),
            .b = Tensor(b, DType::bf16, of_b, device),
            .c = Tensor(c, adds ? DType::f32 : DType::bf16, {m, n}, device),
            .transpose_a = transpose_a != 0,
            .transpose_b = transpose_b != 0,
            .beta = adds ? 1. : 0.,
            .workspace = Tensor(workspace, DType::u8, {workspace_bytes}, device)},
           {stream});
  });
}

// y = f(x w1^T) w2^T without biases, in bf16; h and signs are kept where signs is given. Weight gradients are summed in
// fp32.
EXPORT int ingot_bench_wide_mlp(void* x, void* w1, void* w2, void* h, void* signs, void* y, int64_t rows, int64_t width,
                                int64_t hidden, const char* act, void* workspace, int64_t workspace_bytes,
                                void* stream) {
  return guarded([&] {
    const auto of = [&](void* at, int64_t r, int64_t c) { return Tensor(at, DType::bf16, {r, c}, kGpu); };
    const Tensor room = raw(workspace, workspace_bytes);
    linear({.x = of(x, rows, width),
            .w = of(w1, hidden, width),
            .y = of(h, rows, hidden),
            .signs = signs != nullptr ? raw(signs, linear_sign_bytes(rows, hidden, kGpu)) : Tensor(),
            .act = activation_named(act),
            .workspace = room},
           {stream});
    linear({.x = of(h, rows, hidden), .w = of(w2, width, hidden), .y = of(y, rows, width), .workspace = room},
           {stream});
  });
}
EXPORT int ingot_bench_wide_mlp_backward(void* dy, void* x, void* w1, void* w2, void* h, void* signs, void* dh,
                                         void* dx, void* dw1, void* dw2, int64_t rows, int64_t width, int64_t hidden,
                                         const char* act, void* workspace, int64_t workspace_bytes, void* stream) {
  return guarded([&] {
    const auto of = [&](void* at, int64_t r, int64_t c) { return Tensor(at, DType::bf16, {r, c}, kGpu); };
    const auto sums = [&](void* at, int64_t r, int64_t c) { return Tensor(at, DType::f32, {r, c}, kGpu); };
    const Tensor room = raw(workspace, workspace_bytes);
    linear_backward({.dy = of(dy, rows, width),
                     .x = of(h, rows, hidden),
                     .w = of(w2, width, hidden),
                     .dx = of(dh, rows, hidden),
                     .dw = sums(dw2, width, hidden),
                     .signs = raw(signs, linear_sign_bytes(rows, hidden, kGpu)),
                     .act = activation_named(act),
                     .workspace = room},
                    {stream});
    linear_backward({.dy = of(dh, rows, hidden),
                     .x = of(x, rows, width),
                     .w = of(w1, hidden, width),
                     .dx = of(dx, rows, width),
                     .dw = sums(dw1, hidden, width),
                     .workspace = room},
                    {stream});
  });
}
EXPORT int ingot_bench_sign_bytes(int64_t rows, int64_t columns, int64_t* bytes) {
  return guarded([&] { *bytes = linear_sign_bytes(rows, columns, kGpu); });
}

}  // namespace ingot::testing
