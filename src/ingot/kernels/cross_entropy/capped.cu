// Turns rows of exponentials into losses; apart from the target's column, the exponentials stay as they are (capped.h).
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/block_sum.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/cross_entropy/capped.h"
#include "ingot/kernels/cross_entropy/softcap.cuh"

namespace ingot::cuda {
namespace {

constexpr int kThreads = 128;

struct Params {
  bf16* u;  // null: losses only
  int64_t u_stride;
  const float *sums, *at_target;
  uint32_t vocab, tiles;
  const int32_t* targets;
  float *loss, *lse;   // lse: or null
  const float* dloss;  // used where u is given
  float* factor;
  const bf16* x;
  bf16* scaled;  // may be null
  int64_t x_stride, scaled_stride;
  uint32_t channels;
  float softcap, z_loss;
  int32_t ignore_index;
};

// factor * from, 8 numbers per thread at a time. A factor of 0 gives zeros, also for NaN and infinity.
template <class From>
__device__ __forceinline__ void multiply_row(const From* from, bf16* to, uint32_t eights, uint32_t first, uint32_t step,
                                             float factor) {
  for (uint32_t i = first; i < eights; i += step) {
    tile::Vec<From, 8> v;
    tile::load(v, from + int64_t(i) * 8);
    float x[8];
    tile::to_float(v, x);
#pragma unroll
    for (float& n : x) n = factor == 0 ? 0.f : n * factor;
    tile::store(to + int64_t(i) * 8, tile::from_float<bf16>(x), false);
  }
}

// One block per row.
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ Params p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const int64_t row = blockIdx.x;
  const int32_t target = p.targets[row];
  const bool ignored = target == p.ignore_index, known = target >= 0 && uint32_t(target) < p.vocab;
  const float at_target = known ? p.at_target[row] : __int_as_float(0x7fffffff);
  float mine = 0;
  for (uint32_t t = threadIdx.x; t < p.tiles; t += kThreads) mine += p.sums[row * p.tiles + t];
  const float sum = tile::block_sum<kThreads>(mine, tile::shared<tile::BlockSumMemory<float, kThreads>>());
  const float lse = logf(sum), lifted = 1 + 2 * p.z_loss * lse;
  if (threadIdx.x == 0) {
    p.loss[row] = ignored ? 0.f : (lse - at_target) + p.z_loss * lse * lse;
    if (p.lse != nullptr) p.lse[row] = lse;
  }
  if (p.u == nullptr) return;
  const float factor = ignored ? 0.f : p.dloss[row] * lifted / sum;
  bf16* const u = p.u + row * p.u_stride;
  if (threadIdx.x == 0) {
    p.factor[row] = factor;
    if (!ignored && known)
      u[target] = bf16((ptx::exp2_approx(at_target * kLog2e) - sum / lifted) * Cap(p.softcap).slope(at_target));
  }
  if (ignored)  // even where the logits are not finite
    for (uint32_t i = threadIdx.x; i < p.vocab / 8; i += kThreads)
      tile::store(u + int64_t(i) * 8, tile::Vec<bf16, 8>{}, false);
  if (p.scaled != nullptr)
    multiply_row(p.x + row * p.x_stride, p.scaled + row * p.scaled_stride, p.channels / 8, threadIdx.x, kThreads,
                 factor);
}

// One warp per row.
__global__ void __launch_bounds__(kThreads)
    multiply_rows_kernel(const float* sums, int64_t sums_stride, bf16* y, int64_t y_stride, const float* factor,
                         int64_t rows, uint32_t eights) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const int64_t row = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (row < rows) multiply_row(sums + row * sums_stride, y + row * y_stride, eights, threadIdx.x % 32, 32, factor[row]);
}

}  // namespace

void finish_capped(const Capped& in, const Tensor& x, const CrossEntropy& a, Stream stream) {
  const int64_t rows = in.sums.size(0);
  if (rows == 0) return;
  const Params p{.u = in.u ? in.u.ptr<bf16>() : nullptr,
                 .u_stride = in.u ? in.u.row_stride() : 0,
                 .sums = in.sums.ptr<float>(),
                 .at_target = in.at_target.ptr<float>(),
                 .vocab = uint32_t(in.vocab),
                 .tiles = uint32_t(in.sums.size(1)),
                 .targets = a.targets.ptr<int32_t>(),
                 .loss = a.loss.ptr<float>(),
                 .lse = a.lse ? a.lse.ptr<float>() : nullptr,
                 .dloss = a.dloss ? a.dloss.ptr<float>() : nullptr,
                 .factor = in.factor ? in.factor.ptr<float>() : nullptr,
                 .x = x ? x.ptr<bf16>() : nullptr,
                 .scaled = in.x ? in.x.ptr<bf16>() : nullptr,
                 .x_stride = x ? x.row_stride() : 0,
                 .scaled_stride = in.x ? in.x.row_stride() : 0,
                 .channels = in.x ? uint32_t(in.x.cols()) : 0,
                 .softcap = float(a.softcap),
                 .z_loss = float(a.z_loss),
                 .ignore_index = a.ignore_index};
  gpu::launch("cross_entropy", finish_kernel,
              {.grid = rows, .block = kThreads, .overlap = true, .device = in.sums.device.index}, stream, p);
}

void multiply_rows(const Tensor& factor, const Tensor& sums, const Tensor& y, Stream stream) {
  if (y.numel() == 0) return;
  gpu::launch("cross_entropy", multiply_rows_kernel,
              {.grid = (y.rows() + kThreads / 32 - 1) / (kThreads / 32),
               .block = kThreads,
               .overlap = true,
               .device = y.device.index},
              stream, sums.ptr<float>(), sums.row_stride(), y.ptr<bf16>(), y.row_stride(), factor.ptr<float>(),
              y.rows(), uint32_t(y.cols() / 8));
}

}  // namespace ingot::cuda
