#pragma once
// The kernel: blocks stay for the whole product. A warp brings a stage at a time, 64 columns of 256 rows of weights as
// granules (bulk copies) and of the tile's rows of x (a tensor copy); warpgroups turn granules into wgmma's A
// operand in registers, which is what granules are ordered for, and multiply: rows of weights down, rows of x across.
//
// Codes of 4 and 8 bits become bf16 by moving bits, which leaves them smaller by 2^126 and 2^120; one multiplication
// brings in the block's scale and most of that. What is left, kDrop, keeps large scales in bf16's range.
#include "ingot/gpu/gemm/pipeline.cuh"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/ptx/multiply.cuh"
#include "ingot/gpu/ptx/registers.cuh"
#include "ingot/gpu/ptx/thread.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/grouped/grouped_kernel.h"
#include "ingot/kernels/grouped/schedule.h"
#include "ingot/kernels/quant/granule_product.cuh"

namespace ingot::grouped {

// Who shares the 256 rows of a tile: so many warpgroups, each so many blocks of 64 rows. Of mxfp4, four with a block
// each: a warp cannot decode while it asks for products of registers, and its instructions depend on each other, so two
// warps of a scheduler leave it idle.
template <WeightFormat F, int kRows> struct Team {
  static constexpr int kGroups = F != WeightFormat::fp8 && kRows <= 80 ? 4 : 2, kBlocks = 4 / kGroups;
  static constexpr int kConsumerWarps = 4 * kGroups, kThreads = 32 * (kConsumerWarps + 4);
  static constexpr int kProducerRegisters = kGroups == 4 ? 24 : 40, kConsumerRegisters = kGroups == 4 ? 112 : 232;
  static_assert(kBands == 4 * kBlocks * kGroups, "bands of a tile are dealt out to warps");
};

template <WeightFormat F> constexpr float kDrop = 1;
template <> constexpr float kDrop<WeightFormat::fp8> = 0x1p60f;
template <> constexpr float kDrop<WeightFormat::mxfp4> = 0x1p64f;

// Tiles of 80 rows of x that are at most half full are multiplied as 40. Wider ones, or a third width, spill.
template <int kRows> constexpr int kNarrow = kRows == 80 ? 40 : kRows;

template <WeightFormat F, int kRows> struct Memory {
  static constexpr uint32_t kGranule = granules::Form<F>::kBytes, kA = kBands * kGranule, kB = kRows * 128;
  static constexpr uint32_t kFit = (216 * 1024) / (kA + kB);
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  using Pipe = gemm::Pipeline<kStages, 1, gemm::Team::cooperative, Team<F, kRows>::kGroups>;
  alignas(1024) char b[kStages][kB];
  alignas(128) char a[kStages][kA];
  typename Pipe::Memory pipe;
  int32_t offsets[kMostGroups + 1];
};

__device__ __forceinline__ Walk walk_of(const Params& p, const int32_t* offsets) {
  return {offsets, p.groups, (p.bands + kBands - 1) / kBands, p.tile_rows, blockIdx.x, gridDim.x};
}

// One thread: every tile's stages, as the ring has room. A stage's bands are one copy: seventeen small ones took longer
// to ask for than the products of a stage to compute. Bands beyond a matrix are the next one's, or zeros; nobody reads
// them.
template <WeightFormat F, int kRows> __device__ void produce(const Params& p, Memory<F, kRows>& m) {
  using M = Memory<F, kRows>;
  constexpr uint32_t kBoxRows = kNarrow<kRows>, kBox = kBoxRows * 128;
  typename M::Pipe::Cursor at;
  Walk walk = walk_of(p, m.offsets);
  for (Tile t; walk.next(t);) {
    const uint32_t boxes = t.rows() <= kBoxRows ? 1 : kRows / kBoxRows, band = t.group * p.bands + t.band;
    for (uint32_t step = 0; step < p.granules; ++step, at.advance()) {
      uint64_t* const full = M::Pipe::acquire(m.pipe, at, M::kA + boxes * kBox);
      ptx::tensor_load(m.a[at.stage], &p.weights, int(step * (M::kGranule / 8)), int(band), full);
      for (uint32_t box = 0; box < boxes; ++box)
        ptx::tensor_load(m.b[at.stage] + box * kBox, &p.x, int(step * 64), int(t.row + box * kBoxRows), full);
    }
  }
}

// 2^(s - 65) of byte i, twice; infinity where that is beyond bf16.
__device__ __forceinline__ uint32_t scale_pair(uint32_t scales, uint32_t i) {
  constexpr uint32_t kOne = 0x00800080;  // of both exponents
  return min(__byte_perm(scales, 0, 0x4440 + i), 193u) * kOne + 62 * kOne;
}

// Half a granule in shared memory as the A operand of two steps of 16 columns. `kept`: what the first half's reading
// brings for the second's.
struct Kept {
  uint32_t codes[4], scales[1];
};
template <WeightFormat F, int kHalf>
__device__ __forceinline__ void decode(uint32_t granule, Kept& kept, uint32_t (&a)[2][4]) {
  const uint32_t lane = threadIdx.x % 32;
  if constexpr (F == WeightFormat::bf16) {
#pragma unroll
    for (int s = 0; s < 2; ++s) ptx::load_shared(a[s], granule + (2 * kHalf + s) * 512 + lane * 16);
  } else if constexpr (F == WeightFormat::mxfp4) {
    if constexpr (kHalf == 0) {
      ptx::load_shared(kept.codes, granule + lane * 16);
      ptx::load_shared(kept.scales, granule + 512 + lane / 4 * 4);
    }
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[s][i] = ptx::multiply_bf16x2(granules::two_of_mxfp4(kept.codes[2 * kHalf + s], i),
                                       scale_pair(kept.scales[0], uint32_t(2 * kHalf + (i & 1))));
  } else {
    // Granules hold four columns a lane, as products of 8 bits take them; those of 16 want two, and two 8 further.
    constexpr uint32_t kUp = 0x5d805d80;  // 2^60
    const uint32_t g = lane / 4, t = lane % 4;
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t holder = 4 * g + i / 2 * 2 + t / 2, word = s * 2 + (i & 1);
        uint32_t w[1];
        ptx::load_shared(w, granule + kHalf * 512 + holder * 16 + word * 4);
        const uint32_t two = w[0] >> (t % 2 * 16);
        a[s][i] = ptx::multiply_bf16x2(granules::even_of_fp8((two & 0xff) | (two & 0xff00) << 8), kUp);
      }
  }
}

template <WeightFormat F, int kRows> class Consumer {
 public:
  using M = Memory<F, kRows>;
  static constexpr int kBlocks = Team<F, kRows>::kBlocks;
  __device__ __forceinline__ Consumer(const Params& p, M& m, uint32_t warp) : p_(p), m_(m) {
#pragma unroll
    for (uint32_t r = 0; r < kBlocks; ++r) band_[r] = (warp / 4 * kBlocks + r) * 4 + warp % 4;
  }
  // All products of a tile of so many rows of x. While those of half a stage run, the next half is decoded into other
  // registers; a stage is handed back when the next one's first products are under way.
  template <int kWidth> __device__ __forceinline__ void multiply(float (&d)[kBlocks][kWidth / 2]) {
    Half first, second;
    Kept kept[kBlocks];
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) ptx::fence_registers(d[r]);
    fetch(first, kept);
    for (uint32_t step = 0, before = 0;; before = at_.stage, at_.advance(), fetch(first, kept)) {
      issue<kWidth, 0>(d, first, step > 0);
      ptx::wgmma_wait_group<1>();
      if (step > 0) M::Pipe::release(m_.pipe, before);
      const uint32_t from = ptx::shared_address(m_.a[at_.stage]);
#pragma unroll
      for (int r = 0; r < kBlocks; ++r) decode<F, 1>(from + band_[r] * M::kGranule, kept[r], second[r]);
      issue<kWidth, 1>(d, second, true);
      if (++step == p_.granules) break;
      ptx::wgmma_wait_group<1>();
    }
    ptx::wgmma_wait_group<0>();
    M::Pipe::release(m_.pipe, at_.stage);
    at_.advance();
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) ptx::fence_registers(d[r]);
  }
  uint32_t band_[kBlocks];  // of the tile, this warp's

 private:
  using Half = uint32_t[kBlocks][2][4];
  __device__ __forceinline__ void fetch(Half& a, Kept (&kept)[kBlocks]) {
    M::Pipe::wait(m_.pipe, at_);
    const uint32_t from = ptx::shared_address(m_.a[at_.stage]);
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) decode<F, 0>(from + band_[r] * M::kGranule, kept[r], a[r]);
  }
  template <int kWidth, int kHalf>
  __device__ __forceinline__ void issue(float (&d)[kBlocks][kWidth / 2], Half& a, bool adds) {
    const uint32_t b = ptx::shared_address(m_.b[at_.stage]);
#pragma unroll
    for (int r = 0; r < kBlocks; ++r)
#pragma unroll
      for (int s = 0; s < 2; ++s) ptx::fence_registers(a[r][s]);
    ptx::wgmma_fence();
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int r = 0; r < kBlocks; ++r)
        ptx::wgmma<bf16, kWidth>(d[r], a[r][s],
                                 tile::operand<ptx::Major::k, tile::Swizzle::b128>(b, uint32_t(16 * (2 * kHalf + s))),
                                 adds || s > 0);
    ptx::wgmma_commit_group();
  }
  const Params& p_;
  M& m_;
  typename M::Pipe::Cursor at_;
};

__device__ __forceinline__ float gate(float gate, float up, float limit, float alpha) {
  if (limit > 0) {
    gate = fminf(gate, limit);
    up = fminf(fmaxf(up, -limit), limit);
  }
  return gate / (1 + __expf(-alpha * gate)) * (up + 1);
}

// A band's sums: thread (g, t) has rows g and g + 8 of the weights, of every 8 rows of x the two from 2 t on.
template <WeightFormat F, int kRows, bool kGated>
__device__ __forceinline__ void finish(const Params& p, const Tile& t, uint32_t band, const float (&d)[kRows / 2]) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4;
  float scale[2], bias[2];
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t n = 16 * band + g + 8 * half;
    scale[half] = kDrop<F>;
    if constexpr (F == WeightFormat::fp8)
      scale[half] *= reinterpret_cast<const float*>(p.w + t.group * p.matrix_bytes + band * p.band_bytes +
                                                    size_t(p.granules) * granules::Form<F>::kBytes)[g + 8 * half];
    bias[half] = p.bias != nullptr && n < p.n ? p.bias[size_t(t.group) * p.n + n] : 0;
  }
  if constexpr (kGated) {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const float v[2] = {d[4 * j + 2 * half] * scale[half] + bias[half],
                            d[4 * j + 2 * half + 1] * scale[half] + bias[half]};
        // Gate and up are neighbours' rows: of the two rows of x, each of them takes one.
        const bool second = g % 2 == 1;
        const float other = __shfl_xor_sync(~0u, second ? v[0] : v[1], 4);
        const uint32_t n = 16 * band + 8 * half + g, r = t.row + 8 * j + lane % 4 * 2 + second;
        if (r < t.row_end && n < p.n)
          static_cast<bf16*>(p.y)[size_t(r) * p.y_stride + n / 2] =
              bf16(gate(second ? other : v[0], second ? v[1] : other, p.limit, p.alpha));
      }
  } else {
    // What is added to is asked for together: one load after the other took as long as the products.
    constexpr int kMost = kRows <= 80 ? 1 : 4, kTogether = kRows / 8 < kMost ? kRows / 8 : kMost;
#pragma unroll
    for (int first = 0; first < kRows / 8; first += kTogether) {
      float old[4 * kTogether] = {};
      const auto each = [&](auto&& use) {
#pragma unroll
        for (int i = 0; i < 4 * kTogether; ++i) {  // as in d: two columns of each half
          const uint32_t half = i / 2 % 2, row = t.row + 8 * (first + i / 4) + lane % 4 * 2 + i % 2;
          const uint32_t n = 16 * band + 8 * half + g;
          if (row < t.row_end && n < p.n) use(i, half, static_cast<float*>(p.y) + size_t(row) * p.y_stride + n);
        }
      };
      if (p.add) each([&](int i, uint32_t, const float* y) { old[i] = *y; });
      each([&](int i, uint32_t half, float* y) { *y = old[i] + (d[4 * first + i] * scale[half] + bias[half]); });
    }
  }
}

template <WeightFormat F, int kRows, bool kGated, int kWidth>
__device__ __forceinline__ void compute(const Params& p, Consumer<F, kRows>& consumer, const Tile& t) {
  constexpr int kBlocks = Team<F, kRows>::kBlocks;
  float d[kBlocks][kWidth / 2];
  consumer.template multiply<kWidth>(d);
  const auto end = [&](uint32_t band, const auto& sums) {
    if (band < p.bands) finish<F, kWidth, kGated>(p, t, band, sums);
  };
  // Not a loop: it would not be unrolled, being long, and sums that are indexed lie in memory.
  static_assert(kBlocks <= 2);
  end(t.band + consumer.band_[0], d[0]);
  if constexpr (kBlocks == 2) end(t.band + consumer.band_[1], d[1]);
}

template <WeightFormat F, int kRows, bool kGated>
__global__ void __launch_bounds__(Team<F, kRows>::kThreads, 1) grouped_kernel(const __grid_constant__ Params p) {
  using M = Memory<F, kRows>;
  using T = Team<F, kRows>;
  auto& m = *tile::dynamic_shared<M>();
  const uint32_t warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) M::Pipe::init(m.pipe);
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  for (uint32_t g = threadIdx.x; g <= p.groups; g += T::kThreads) m.offsets[g] = p.offsets[g];
  __syncthreads();
  if (warp >= T::kConsumerWarps) {
    ptx::decrease_registers<T::kProducerRegisters>();
    if (warp == T::kConsumerWarps && ptx::elect_one()) produce<F, kRows>(p, m);
    __syncwarp();
  } else {
    ptx::increase_registers<T::kConsumerRegisters>();
    Consumer<F, kRows> consumer(p, m, warp);
    Walk walk = walk_of(p, m.offsets);
    for (Tile t; walk.next(t);) {
      if (kNarrow<kRows> < kRows && t.rows() <= kNarrow<kRows>)
        compute<F, kRows, kGated, kNarrow<kRows>>(p, consumer, t);
      else
        compute<F, kRows, kGated, kRows>(p, consumer, t);
    }
  }
}

template <WeightFormat F, int kRows>
void launch_tile(const Params& p, bool gated, int64_t blocks, int device, Stream stream) {
  const gpu::Launch at{.grid = blocks,
                       .block = Team<F, kRows>::kThreads,
                       .smem = int64_t(sizeof(Memory<F, kRows>)),
                       .overlap = true,
                       .device = device};
  if (gated) return gpu::launch("grouped_linear", grouped_kernel<F, kRows, true>, at, stream, p);
  gpu::launch("grouped_linear", grouped_kernel<F, kRows, false>, at, stream, p);
}
template <WeightFormat F>
void launch(const Params& p, int rows, bool gated, int64_t blocks, int device, Stream stream) {
  if (rows == 16) return launch_tile<F, 16>(p, gated, blocks, device, stream);
  if (rows == 80) return launch_tile<F, 80>(p, gated, blocks, device, stream);
  launch_tile<F, 128>(p, gated, blocks, device, stream);
}

}  // namespace ingot::grouped
