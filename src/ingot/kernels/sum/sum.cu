#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/block_sum.cuh"
#include "ingot/kernels/sum/sum.h"

namespace ingot::cuda {
namespace {

constexpr int kThreads = 1024;

// A single block, because the losses of a step are only about 100,000 numbers.
template <class T>
__global__ void __launch_bounds__(kThreads) add_up(const T* __restrict__ x, int64_t count, double* total) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += double(x[i]);
  sum = tile::block_sum(sum, tile::shared<tile::BlockSumMemory<double, kThreads>>());
  if (threadIdx.x == 0) *total += sum;
}

}  // namespace

void sum(const Sum& a, Stream stream) {
  with_wide_float_type(a.x.dtype, "sum", [&](auto scalar) {
    using T = decltype(scalar);
    gpu::launch("sum", add_up<T>, {.block = kThreads, .device = a.x.device.index}, stream, a.x.ptr<T>(), a.x.numel(),
                a.total.ptr<double>());
  });
}

}  // namespace ingot::cuda
