// Functions of libingot_bench.so (testing/native.h).
#include "ingot/kernels/rmsnorm/rmsnorm.h"

#include "ingot/kernels/rmsnorm/rmsnorm_config.h"
#include "ingot/testing/native.h"

namespace ingot::testing {

// Null operands are left out. config: null for the default, or {vecs_per_thread (0: elements), rows_per_group, group,
// cluster, threads, overlap, streaming}.
EXPORT int ingot_bench_rmsnorm(const char* dtype, void* x, const char* w_dtype, void* w, void* residual, void* sum,
                               void* y, void* rstd, int64_t rows, int64_t cols, double eps, const int* config,
                               void* stream) {
  return guarded([&] {
    const Device device{Device::cuda, 0};
    const DType t = dtype_named(dtype);
    const Shape matrix{rows, cols};
    RmsNorm a{.x = Tensor(x, t, matrix, device), .y = Tensor(y, t, matrix, device), .eps = eps};
    if (w != nullptr) a.w = Tensor(w, dtype_named(w_dtype), {cols}, device);
    if (residual != nullptr) {
      a.residual = Tensor(residual, t, matrix, device);
      a.sum = Tensor(sum, t, matrix, device);
    }
    if (rstd != nullptr) a.rstd = Tensor(rstd, DType::f32, {rows}, device);
    if (config == nullptr) return rmsnorm(a, {stream});
    const cuda::RmsNormConfig c{.vectors = config[0] > 0,
                                .vecs_per_thread = config[0],
                                .rows_per_group = config[1],
                                .group = config[2],
                                .cluster = config[3],
                                .threads = config[4],
                                .streaming = config[6] != 0};
    cuda::rmsnorm_with(a, {.config = c, .overlap = config[5] != 0}, {stream});
  });
}

EXPORT int ingot_bench_rmsnorm_workspace(const char* dtype, int64_t rows, int64_t cols, int64_t* bytes) {
  return guarded([&] {
    *bytes = rmsnorm_backward_workspace_bytes(rows, cols, dtype_named(dtype), Device{Device::cuda, 0});
  });
}

// config: null for the default, or {group, cluster, threads, stages, blocks, overlap}.
EXPORT int ingot_bench_rmsnorm_backward(const char* dtype, void* s, const char* w_dtype, void* w, void* dsum, void* dy,
                                        void* rstd, void* dx, void* dw, void* workspace, int64_t workspace_bytes,
                                        int64_t rows, int64_t cols, double eps, const int* config, void* stream) {
  return guarded([&] {
    const Device device{Device::cuda, 0};
    const DType t = dtype_named(dtype);
    const auto matrix = [&](void* p) { return Tensor(p, t, {rows, cols}, device); };
    RmsNormBackward a{.dy = matrix(dy),
                      .s = matrix(s),
                      .rstd = Tensor(rstd, DType::f32, {rows}, device),
                      .dx = matrix(dx),
                      .eps = eps};
    if (w != nullptr) a.w = Tensor(w, dtype_named(w_dtype), {cols}, device);
    if (dsum != nullptr) a.dsum = matrix(dsum);
    if (dw != nullptr) {
      a.dw = Tensor(dw, DType::f32, {cols}, device);
      a.workspace = Tensor(workspace, DType::u8, {workspace_bytes}, device);
    }
    if (config == nullptr) return rmsnorm_backward(a, {stream});
    const cuda::RmsNormBackwardConfig c{
        .group = config[0], .cluster = config[1], .threads = config[2], .stages = config[3], .blocks = config[4]};
    cuda::rmsnorm_backward_with(a, {.config = c, .overlap = config[5] != 0}, {stream});
  });
}

}  // namespace ingot::testing
