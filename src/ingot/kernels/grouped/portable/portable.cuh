#pragma once
// The portable kernel: a block computes tiles of 256 rows of weights by kWidth rows of x, one after another. All
// threads bring stages of 64 columns by cp.async: weight tiles as they are stored, and rows of x in the 128-byte
// swizzle. Each of eight warps decodes the weight tiles of two row tiles into mma.sync's left operand, as Hopper's
// warps do, and multiplies by the rows of x. Weight tiles and columns that do not exist are zeros.
//
// A block needs at most 99 KB of shared memory. Tiles are dealt out in a fixed order, without claims.
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/cp_async_or_zero.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/settle.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/kernels/grouped/parts/decode.cuh"
#include "ingot/kernels/grouped/parts/finish.cuh"
#include "ingot/kernels/grouped/portable/portable.h"
#include "ingot/kernels/grouped/schedule.h"

namespace ingot::cuda::grouped_portable {

constexpr int kWarps = kThreads / 32, kBandsOfWarp = int(kBands) / kWarps;
constexpr uint32_t kMostMemory = 99 * 1024, kOffsetBytes = (kMostGroups + 1) * 4;

template <WeightFormat F, int kWidth> struct Memory {
  static constexpr uint32_t kWeightTile = weight_tiles::Form<F>::kBytes, kA = kBands * kWeightTile, kB = kWidth * 128;
  static constexpr uint32_t kFit = (kMostMemory - kOffsetBytes) / (kA + kB), kStages = kFit < 4 ? kFit : 4;
  static_assert(kStages >= 2, "a stage is multiplied while the next one arrives");
  alignas(1024) char b[kStages][kB];
  alignas(128) char a[kStages][kA];
  int32_t offsets[kMostGroups + 1];
};

// The stages of a tile. A thread's addresses are computed once, so that a copy takes few instructions.
template <WeightFormat F, int kWidth> class Steps {
 public:
  using M = Memory<F, kWidth>;
  __device__ __forceinline__ Steps(const Arguments& p, M& m, const Tile& t)
      : p_(p), tile_(t), a_(ptx::shared_address(m.a[0])), b_(ptx::shared_address(m.b[0])) {
    const Product& w = p.product;
    weights_ = w.w + t.group * w.matrix_bytes + t.row_tile * w.row_tile_bytes;
    const uint32_t bands = w.row_tiles - t.row_tile;
#pragma unroll
    for (uint32_t j = 0; j < kWeightCopies; ++j) {
      const uint32_t i = threadIdx.x + j * kThreads, band = i / kChunks;
      places_[j] = uint32_t(band * w.row_tile_bytes) + i % kChunks * 16;
      present_ |= uint32_t(band < bands) << j;
      ptx::settle(places_[j]);
    }
    ptx::settle(present_), ptx::settle(a_), ptx::settle(b_);
#pragma unroll
    for (uint32_t s = 0; s + 1 < M::kStages; ++s) {
      request_weights(s), request_rows(s);
      ptx::cp_async_commit_group();
    }
  }
  // Waits for a step. The stage of the step before is then free for a request. Every step is a group, empty beyond the
  // last, so that this counts groups alike for all steps.
  __device__ __forceinline__ void wait() const {
    ptx::cp_async_wait_group<M::kStages - 2>();
    __syncthreads();
  }
  __device__ __forceinline__ uint32_t a(uint32_t step) const { return a_ + step % M::kStages * M::kA; }
  __device__ __forceinline__ uint32_t b(uint32_t step) const { return b_ + step % M::kStages * M::kB; }
  __device__ __forceinline__ void request_weights(uint32_t step) const {
    if (step >= p_.product.weight_tiles) return;
    const uint8_t* const from = weights_ + step * M::kWeightTile;
    const uint32_t to = a(step) + threadIdx.x * 16;
#pragma unroll
    for (uint32_t j = 0; j < kWeightCopies; ++j) {
      if ((j + 1) * kThreads > kBands * kChunks && threadIdx.x + j * kThreads >= kBands * kChunks) break;
      ptx::cp_async_or_zero(to + j * kThreads * 16, from + places_[j], (present_ >> j & 1) != 0);
    }
  }
  __device__ __forceinline__ void request_rows(uint32_t step) const {
    if (step >= p_.product.weight_tiles) return;
    const uint32_t chunk = threadIdx.x % 8, column = step * 64 + chunk * 8, to = b(step);
    const uint32_t valid = column < p_.x.columns ? min(16u, 2 * (p_.x.columns - column)) : 0;
    const char* const from = p_.x.data + tile_.row * p_.x.stride + column * 2;
#pragma unroll
    for (uint32_t r = threadIdx.x / 8; r < kWidth; r += kThreads / 8)
      ptx::cp_async<16>(to + tile::swizzled<tile::Swizzle::b128>(r, chunk * 16), from + r * p_.x.stride,
                        r < tile_.rows() ? valid : 0);
  }

 private:
  static constexpr uint32_t kChunks = M::kWeightTile / 16;  // of a weight tile
  static constexpr uint32_t kWeightCopies = (kBands * kChunks + kThreads - 1) / kThreads;
  const Arguments& p_;
  const Tile& tile_;
  const uint8_t* weights_;
  uint32_t a_, b_, present_ = 0, places_[kWeightCopies];  // bytes behind the step's first weight tile
};

template <int kWidth> struct Sums { float d[kBandsOfWarp][kWidth / 2]; };

// The products of a step with a warp's row tiles, for the rows of x that exist. Calls between(k) after the products of
// columns 16 k to 16 k + 15, for the copies of a later step: their instructions take the time of products.
template <WeightFormat F, int kWidth, class Between>
__device__ __forceinline__ void multiply(Sums<kWidth>& sums, uint32_t a, uint32_t b, uint32_t rows, Between&& between) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t right = b + tile::swizzled<tile::Swizzle::b128>(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 16);
  a += warp * kBandsOfWarp * Memory<F, kWidth>::kWeightTile;
  Kept kept[kBandsOfWarp];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t left[kBandsOfWarp][1][4];
#pragma unroll
    for (int r = 0; r < kBandsOfWarp; ++r) decode<F, 1>(a + r * Memory<F, kWidth>::kWeightTile, k, kept[r], left[r]);
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
      if (n > 0 && 16 * uint32_t(n) >= rows) break;
      uint32_t x[4];
      ptx::ldmatrix(x, (right ^ uint32_t(32 * k)) + uint32_t(n) * 16 * 128);
      const uint32_t low[2] = {x[0], x[1]}, high[2] = {x[2], x[3]};
#pragma unroll
      for (int r = 0; r < kBandsOfWarp; ++r) {
        float* const d = sums.d[r] + 8 * n;
        ptx::mma_m16n8k16(bf16{}, *reinterpret_cast<float(*)[4]>(d), left[r][0], low);
        ptx::mma_m16n8k16(bf16{}, *reinterpret_cast<float(*)[4]>(d + 4), left[r][0], high);
      }
    }
    between(k);
  }
}

template <WeightFormat F, int kWidth, bool kGated>
__device__ __forceinline__ void compute(const Arguments& p, Memory<F, kWidth>& m, const Tile& t) {
  Sums<kWidth> sums;
#pragma unroll
  for (int i = 0; i < kBandsOfWarp * kWidth / 2; ++i) sums.d[i / (kWidth / 2)][i % (kWidth / 2)] = 0;
  const Steps<F, kWidth> steps(p, m, t);
  for (uint32_t step = 0; step < p.product.weight_tiles; ++step) {
    steps.wait();
    const uint32_t next = step + Memory<F, kWidth>::kStages - 1;
    multiply<F, kWidth>(sums, steps.a(step), steps.b(step), t.rows(), [&](int k) {
      if (k == 0) steps.request_weights(next);
      if (k == 1) steps.request_rows(next);
    });
    ptx::cp_async_commit_group();
  }
#pragma unroll
  for (int r = 0; r < kBandsOfWarp; ++r) {
    const uint32_t row_tile = t.row_tile + threadIdx.x / 32 * kBandsOfWarp + r;
    if (row_tile < p.product.row_tiles)
      finish<F, kWidth, kGated>(p.product, t, row_tile, ends_of<F>(p.product, t, row_tile), sums.d[r]);
  }
  __syncthreads();  // the next tile's stages overwrite these
}

template <WeightFormat F, int kWidth, bool kGated>
__global__ void __launch_bounds__(kThreads, kWidth <= 48 ? 2 : 1)
    portable_grouped_kernel(const __grid_constant__ Arguments p) {
  auto& m = *tile::dynamic_shared<Memory<F, kWidth>>();
  const Product& w = p.product;
  for (uint32_t g = threadIdx.x; g <= w.groups; g += kThreads) m.offsets[g] = w.offsets[g];
  __syncthreads();
  Walk walk{m.offsets, w.groups, kBands, (w.row_tiles + kBands - 1) / kBands, w.tile_rows, blockIdx.x, gridDim.x};
  for (Tile t; walk.next(t);) compute<F, kWidth, kGated>(p, m, t);
}

template <WeightFormat F, int kWidth> Kernel kernel_of_width(bool gated) {
  return {gated ? portable_grouped_kernel<F, kWidth, true> : portable_grouped_kernel<F, kWidth, false>,
          int64_t(sizeof(Memory<F, kWidth>))};
}
template <WeightFormat F> Kernel kernel_of(int width, bool gated) {
  if (width == kPortableWidths[0]) return kernel_of_width<F, kPortableWidths[0]>(gated);
  if (width == kPortableWidths[1]) return kernel_of_width<F, kPortableWidths[1]>(gated);
  if (F == WeightFormat::bf16 || width == kPortableWidths[2]) return kernel_of_width<F, kPortableWidths[2]>(gated);
  if constexpr (F != WeightFormat::bf16) return kernel_of_width<F, kPortableWidths[3]>(gated);
}

}  // namespace ingot::cuda::grouped_portable
