// Matrix products for the references of the MLPs' CUDA suite: a thread for each element adds in the order of k, in fp64
// or as a plain fp32 product. On the CPU these products took nine tenths of the suite's time.
#include <gtest/gtest.h>

#include <cmath>

#include "ingot/gpu/device.h"
#include "ingot/gpu/launch.h"
#include "ingot/kernels/mlp/cuda_chain.test.h"
#include "ingot/testing/gpu_test.h"

namespace ingot::mlp_cuda_test {
namespace {

constexpr int kThreads = 128;

struct Elements {
  const double* data;
  int64_t row, column;  // strides
  __device__ double at(int64_t r, int64_t c) const { return data[r * row + c * column]; }
};
__global__ void __launch_bounds__(kThreads)
    product_kernel(Elements a, Elements q, double* out, int64_t m, int64_t k, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, row = i / n, column = i % n;
  if (row >= m) return;
  double sum = 0;
  for (int64_t p = 0; p < k; ++p) sum = fma(a.at(row, p), q.at(p, column), sum);
  out[i] = sum;
}
// Fused multiply-adds in the order of k, started again every 128. The product of two floats is exact in a double.
__global__ void __launch_bounds__(kThreads)
    fp32_product_kernel(Elements a, Elements q, double* out, int64_t m, int64_t k, int64_t n) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x, row = i / n, column = i % n;
  if (row >= m) return;
  float sum = 0, run = 0;
  for (int64_t p = 0; p < k; ++p) {
    run = float(double(float(a.at(row, p))) * double(float(q.at(p, column))) + double(run));
    if ((p + 1) % int64_t(kProductRestart) != 0 && p + 1 < k) continue;
    sum += run;
    run = 0;
  }
  out[i] = double(sum);
}

// Device memory that products share: an allocation waits for all kernels of the GPU.
class Kept {
 public:
  double* of(size_t numbers) {
    const int64_t bytes = int64_t(numbers * sizeof(double));
    if (memory_.bytes() < bytes) memory_ = gpu::DeviceMemory(bytes + bytes / 2);
    return static_cast<double*>(memory_.data());
  }
  const double* holding(const Vector& v) {
    double* const p = of(v.size());
    gpu::copy_to_device(p, v.data(), int64_t(v.size() * sizeof(double)));
    return p;
  }

 private:
  gpu::DeviceMemory memory_;
};

}  // namespace

Vector product_on_gpu(const Vector& a, bool transpose_a, const Vector& q, bool transpose_q, size_t m, size_t k,
                      size_t n, bool as_fp32) {
  if (m * n == 0) return {};
  if (k == 0) return Vector(m * n, 0.0);
  static Kept left, right, results;
  const double* const x = left.holding(a);
  const double* const y = right.holding(q);
  double* const out = results.of(m * n);
  const Elements of_a = transpose_a ? Elements{x, 1, int64_t(m)} : Elements{x, int64_t(k), 1};
  const Elements of_q = transpose_q ? Elements{y, 1, int64_t(k)} : Elements{y, int64_t(n), 1};
  gpu::launch("product of the reference", as_fp32 ? fp32_product_kernel : product_kernel,
              {.grid = int64_t((m * n + kThreads - 1) / kThreads), .block = kThreads}, {}, of_a, of_q, out, int64_t(m),
              int64_t(k), int64_t(n));
  Vector sums(m * n);
  gpu::synchronize();
  gpu::copy_to_host(sums.data(), out, int64_t(sums.size() * sizeof(double)));
  return sums;
}

class MlpReferenceCuda : public testing::GpuTest<> {};

TEST_F(MlpReferenceCuda, ProductsEqualALoopOnTheCpu) {
  constexpr size_t m = 5, k = 300, n = 7;
  Buffer left(DType::f32, {int64_t(m), int64_t(k)}), right(DType::f32, {int64_t(k), int64_t(n)});
  fill_normal(left, 1), fill_normal(right, 2);
  const Vector a = values(left), q = values(right);
  const auto turned = [](const Vector& v, size_t rows, size_t cols) {
    Vector out(v.size());
    for (size_t i = 0; i < rows; ++i)
      for (size_t j = 0; j < cols; ++j) out[j * rows + i] = v[i * cols + j];
    return out;
  };
  for (const bool transpose_a : {false, true})
    for (const bool transpose_q : {false, true}) {
      const Vector of_a = transpose_a ? turned(a, m, k) : a, of_q = transpose_q ? turned(q, k, n) : q;
      const Vector exact = product_on_gpu(of_a, transpose_a, of_q, transpose_q, m, k, n, false);
      const Vector rounded = product_on_gpu(of_a, transpose_a, of_q, transpose_q, m, k, n, true);
      for (size_t i = 0; i < m; ++i)
        for (size_t j = 0; j < n; ++j) {
          long double sum = 0;
          double size = 0;
          float all = 0, run = 0;
          for (size_t p = 0; p < k; ++p) {
            const double term = a[i * k + p] * q[p * n + j];
            sum += term, size += std::abs(term);
            run = float(term + double(run));
            if ((p + 1) % 128 == 0 || p + 1 == k) all += run, run = 0;
          }
          EXPECT_LE(std::abs(exact[i * n + j] - double(sum)), double(k) * 1.2e-16 * size) << i << ' ' << j;
          EXPECT_EQ(rounded[i * n + j], double(all)) << i << ' ' << j;
          Vector column(k);
          for (size_t p = 0; p < k; ++p) column[p] = q[p * n + j];
          EXPECT_EQ(dot(&a[i * k], column.data(), k, true), double(all)) << i << ' ' << j;
          EXPECT_EQ(dot(&a[i * k], column.data(), k, false), exact[i * n + j]) << i << ' ' << j;
        }
    }
}

}  // namespace ingot::mlp_cuda_test
