#pragma once
// The products of a tile. A warp reads each operand ahead of its use, even across the end of a stage. While the
// products of one operand of x are issued, the warp reads the next operand of x. While the products of 16 columns are
// issued, the warp reads and decodes the weights of the next 16 columns. The last products of a stage begin with a
// barrier, after which the next stage may be read and the preceding stage may be filled.
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/mma.cuh"
#include "ingot/kernels/grouped/parts/decode.cuh"
#include "ingot/kernels/grouped/portable/copies.cuh"

namespace ingot::cuda::grouped_portable {

// kFull: the tile has so many rows of x that no product can be left out. Then there are no branches around products,
// which would keep the compiler from placing reads between the products.
template <WeightFormat F, int kWidth, bool kFull> struct Multiplier {
  using L = Form<F, kWidth>;
  static constexpr int kBlocks = L::kRows / 16;  // of 16 rows of x

  float (&d)[L::kBandsOfWarp][L::kRows / 2];
  uint32_t rows;  // of x, of this warp
  uint32_t left[2][L::kBandsOfWarp][1][4], x[2][4];
  Kept kept[L::kBandsOfWarp];

  // Reads 16 columns of the warp's row tiles, from column 16 k on.
  __device__ __forceinline__ void read_weights(uint32_t a, int k) {
#pragma unroll
    for (int r = 0; r < L::kBandsOfWarp; ++r) decode<F, 1>(a + uint32_t(r) * L::kBand, k, kept[r], left[k % 2][r]);
  }
  // Computes the products of 16 columns, from column 16 k on, of the stage at b. Reads the operands of the next 16
  // columns, whose stage is at (next_a, next_b).
  template <int k> __device__ __forceinline__ void multiply(uint32_t b, uint32_t next_a, uint32_t next_b) {
    constexpr int kNext = (k + 1) % L::kProducts, kFirst = kFull ? k * kBlocks : 0;
    static_assert(!kFull || L::kProducts * kBlocks % 2 == 0, "a stage begins with the first of the two operands");
    const uint32_t here = b ^ uint32_t(32 * k), after = next_b ^ uint32_t(32 * kNext);
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      const bool last = n + 1 == kBlocks || (!kFull && 16 * uint32_t(n + 1) >= rows);
      const uint32_t(&now)[4] = x[(kFirst + n) % 2];
      ptx::ldmatrix(x[(kFirst + n + 1) % 2], last ? after : here + uint32_t(n + 1) * 16 * L::kRowBytes);
      const uint32_t low[2] = {now[0], now[1]}, high[2] = {now[2], now[3]};
#pragma unroll
      for (int r = 0; r < L::kBandsOfWarp; ++r) {
        float* const sums = d[r] + 8 * n;
        ptx::mma_m16n8k16(bf16{}, *reinterpret_cast<float(*)[4]>(sums), left[k % 2][r][0], low);
        ptx::mma_m16n8k16(bf16{}, *reinterpret_cast<float(*)[4]>(sums + 4), left[k % 2][r][0], high);
      }
      if (n == 0) read_weights(next_a, kNext);
      if (kFull || !last) continue;
      if ((n + 1) % 2 == 1)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[0][i] = x[1][i];
      break;
    }
  }
};

// Computes the sums of tile t. Its first steps have been requested, and its first step is complete in `stage`. On
// return `stage` is the stage after the last step. publish() is called once, before the last barrier.
template <WeightFormat F, int kWidth, bool kFull, class Publish>
__device__ __forceinline__ void multiply_tile(const Arguments& p, Memory<F, kWidth>& m, const Tile& t, uint32_t& stage,
                                              float (&d)[Form<F, kWidth>::kBandsOfWarp][Form<F, kWidth>::kRows / 2],
                                              Publish&& publish) {
  using L = Form<F, kWidth>;
  // The warp's weights and the lane's rows of x in a stage. For compute capability 10.0 and later the compiler finds no
  // registers to keep these addresses beside the sums of the widest tiles, and computes them anew for each stage.
  const auto places = [&](uint32_t in_stage, uint32_t& a, uint32_t& b) {
    uint32_t thread = threadIdx.x;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    if constexpr (L::kBandsOfWarp * L::kRows > 256) ptx::settle(thread);
#endif
    const uint32_t lane = thread % 32, warp = thread / 32;
    a = ptx::shared_address(m.a[0]) + in_stage * L::kA + warp / L::kAcross * L::kBandsOfWarp * L::kBand;
    b = ptx::shared_address(m.b[0]) + in_stage * L::kB + warp % L::kAcross * L::kRows * L::kRowBytes +
        tile::swizzled<L::kSwizzle>(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 16);
  };
  const uint32_t first_row = threadIdx.x / 32 % L::kAcross * L::kRows;
  const uint32_t rows = t.rows() > first_row ? t.rows() - first_row : 0;
#pragma unroll
  for (auto& of_band : d)
#pragma unroll
    for (float& sum : of_band) sum = 0;
  Multiplier<F, kWidth, kFull> z{d, rows, {}, {}, {}};
  uint32_t a, b;
  places(stage, a, b);
  z.read_weights(a, 0);
  ptx::ldmatrix(z.x[0], b);
  const uint32_t steps = steps_of<F, kWidth>(p.product), publishes = steps < 3 ? 0 : steps - 3;
  uint32_t step = 0;
  do {
    places(stage, a, b);
    z.template multiply<0>(b, a, b);
    if constexpr (L::kProducts == 4) {
      z.template multiply<1>(b, a, b);
      z.template multiply<2>(b, a, b);
    }
    if (step == publishes) publish();
    ptx::cp_async_wait_group<L::kStages - 3>();
    __syncthreads();
    request(p, m, t, step + L::kStages - 1, stage == 0 ? L::kStages - 1 : stage - 1);
    // The last step also reads operands ahead, although no product uses them. It reads them from its own stage, because
    // other warps may already fill the next stage.
    if (step + 1 < steps) stage = next_stage<F, kWidth>(stage);
    uint32_t next_a, next_b;
    places(stage, next_a, next_b);
    z.template multiply<L::kProducts - 1>(b, next_a, next_b);
  } while (++step < steps);
  stage = next_stage<F, kWidth>(stage);
}

}  // namespace ingot::cuda::grouped_portable
