// Part of libingot_bench.so (testing/native.h).
#include "ingot/kernels/cross_entropy/cross_entropy.h"

#include "ingot/testing/native.h"

namespace ingot::testing {

// --- linear + softcap + cross entropy: losses, and gradients of their mean; dw accumulates
EXPORT int ingot_bench_linear_cross_entropy_workspace(int64_t rows, int64_t features, int64_t vocab, int64_t* bytes) {
  return guarded(
      [&] { *bytes = linear_cross_entropy_workspace_bytes(rows, features, vocab, DType::bf16, Products::bf16, kGpu); });
}
EXPORT int ingot_bench_linear_cross_entropy(void* x, void* w, void* targets, void* loss, void* dloss, void* dx,
                                            void* dw, int64_t rows, int64_t features, int64_t vocab, double softcap,
                                            void* workspace, int64_t workspace_bytes, void* stream) {
  return guarded([&] {
    linear_cross_entropy({.x = Tensor(x, DType::bf16, {rows, features}, kGpu),
                          .w = Tensor(w, DType::bf16, {vocab, features}, kGpu),
                          .targets = Tensor(targets, DType::i32, {rows}, kGpu),
                          .loss = Tensor(loss, DType::f32, {rows}, kGpu),
                          .dloss = Tensor(dloss, DType::f32, {rows}, kGpu),
                          .dx = Tensor(dx, DType::bf16, {rows, features}, kGpu),
                          .dw = Tensor(dw, DType::bf16, {vocab, features}, kGpu),
                          .workspace = raw(workspace, workspace_bytes),
                          .softcap = softcap,
                          .products = Products::bf16},
                         {stream});
  });
}

}  // namespace ingot::testing
