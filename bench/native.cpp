// libingot_bench.so: the shipped entry points over raw pointers and a stream, so that a Python process can time them
// beside PyTorch. Every function returns 0, or 1 with the reason in ingot_bench_error().
#include <string>

#include "ingot/core/version.h"
#include "ingot/gpu/bandwidth.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/rmsnorm/rmsnorm_config.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {
using namespace ingot;

thread_local std::string last_error;

template <class Use> int guarded(Use&& use) {
  try {
    use();
    return 0;
  } catch (const std::exception& e) {
    last_error = e.what();
    return 1;
  }
}

DType dtype_named(const std::string& name) {
  for (DType t : {DType::f32, DType::bf16, DType::f16})
    if (name_of(t) == name) return t;
  fail(ErrorCode::usage, "bench: found dtype ", name, ", expected f32, bf16 or f16");
}
}  // namespace

EXPORT const char* ingot_bench_error() { return last_error.c_str(); }
EXPORT const char* ingot_bench_commit() { return commit(); }

EXPORT int ingot_bench_copy(void* to, const void* from, int64_t bytes, void* stream) {
  return guarded([&] { gpu::copy_kernel(to, from, bytes, {stream}); });
}
EXPORT int ingot_bench_read(const void* from, int64_t bytes, void* sink, void* stream) {
  return guarded([&] { gpu::read_kernel(from, bytes, sink, {stream}); });
}

// Operands that are null are left out. config: null for the default, or {vecs_per_thread (0: elements), rows_per_group,
// group, cluster, threads, overlap, evict_first}.
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
                                .threads = config[4]};
    cuda::rmsnorm_with(a, {.config = c, .overlap = config[5] != 0, .evict_first = config[6]}, {stream});
  });
}

// What the default would be, in the layout above.
EXPORT int ingot_bench_rmsnorm_config(const char* dtype, int64_t rows, int64_t cols, int residual, int* config) {
  return guarded([&] {
    const auto c =
        cuda::pick_rmsnorm_config({.rows = rows, .cols = cols, .dtype = dtype_named(dtype), .residual = residual != 0});
    const int values[7] = {c.vectors ? c.vecs_per_thread : 0, c.rows_per_group, c.group, c.cluster, c.threads, 1, -1};
    for (int i = 0; i < 7; ++i) config[i] = values[i];
  });
}
