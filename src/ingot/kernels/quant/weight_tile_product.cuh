#pragma once
// Products of weight tiles (weight_tiles.h) with a few columns, on tensor cores: the block's warps share a band's
// weight tiles, and their sums meet in shared memory.
//   sum[r, j] = sum_c w[r, c] x[j, c]        r < 16 rows of a band, j < 1, 8 or 16 columns
// A column is a row of bf16 activations in the order in which the lanes take them: 128 bytes for 64 numbers, two planes
// of 4 x 16 bytes, of which lane 4 g + t takes the t-th. Codes become bf16 by moving bits alone, which leaves them
// smaller by a power of two; columns are larger by another (kLift), so that nothing is subnormal on the way, and
// kDrop makes up for both.
#include "ingot/core/hd.h"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/mma.cuh"
#include "ingot/kernels/quant/device_order.h"
#include "ingot/kernels/quant/quant.h"

namespace ingot::weight_tiles {

constexpr int kWarps = 8, kThreads = 32 * kWarps;

template <WeightFormat F> struct Form;
template <> struct Form<WeightFormat::bf16> {
  static constexpr uint32_t kBytes = 2048;
  static constexpr float kLift = 1, kDrop = 1;
  static constexpr int kAhead = 2;  // weight tiles a warp has asked for while it multiplies
};
template <> struct Form<WeightFormat::fp8> {
  static constexpr uint32_t kBytes = 1024;
  static constexpr float kLift = 0x1p64f, kDrop = 0x1p56f;  // e4m3's exponent counts from 7, bf16's from 127
  static constexpr int kAhead = 3;
};
template <> struct Form<WeightFormat::mxfp4> {
  static constexpr uint32_t kBytes = 544;
  static constexpr float kLift = 0x1p64f, kDrop = 0x1p62f;
  static constexpr int kAhead = 6;
};

// --- columns

constexpr uint32_t kColumnBytes = 128;  // of a weight tile
INGOT_HD constexpr uint32_t padded(uint32_t numbers) { return (numbers + 63) / 64 * 64; }
INGOT_HD constexpr int64_t column_bytes(uint32_t numbers) { return int64_t(padded(numbers)) * 2; }
// In shared memory: lanes of neighbouring columns read different banks.
INGOT_HD constexpr uint32_t column_stride(uint32_t numbers) { return (padded(numbers) * 2 + 127) / 128 * 128 + 64; }
// Where number c of a column lies, counted in numbers. c and its neighbour share a word: c + 1, of fp8 c + 2.
INGOT_HD constexpr uint32_t place(bool fp8, uint32_t c) {
  const uint32_t first = c / 64 * 64, i = c % 64;
  return fp8 ? first + i / 32 * 32 + i % 16 / 4 * 8 + (i % 32 / 16 * 2 + i % 2) * 2 + i % 4 / 2
             : first + i / 32 * 32 + i % 8 / 2 * 8 + (i / 16 % 2 * 2 + i % 16 / 8) * 2 + i % 2;
}

// Four numbers from c on, c a multiple of 4.
template <WeightFormat F> __device__ __forceinline__ void put4(char* column, uint32_t c, const float (&v)[4]) {
  constexpr bool kFp8 = F == WeightFormat::fp8;
  constexpr float kLift = Form<F>::kLift;
  const uint32_t a =
      kFp8 ? ptx::pack(bf16{}, v[0] * kLift, v[2] * kLift) : ptx::pack(bf16{}, v[0] * kLift, v[1] * kLift);
  const uint32_t b =
      kFp8 ? ptx::pack(bf16{}, v[1] * kLift, v[3] * kLift) : ptx::pack(bf16{}, v[2] * kLift, v[3] * kLift);
  *reinterpret_cast<uint32_t*>(column + 2 * place(kFp8, c)) = a;
  *reinterpret_cast<uint32_t*>(column + 2 * place(kFp8, c + (kFp8 ? 1 : 2))) = b;
}
INGOT_HD constexpr float lift_of(WeightFormat f) { return f == WeightFormat::bf16 ? 1.f : 0x1p64f; }
__device__ __forceinline__ void put(char* column, WeightFormat f, uint32_t c, float v) {
  *reinterpret_cast<bf16*>(column + 2 * place(f == WeightFormat::fp8, c)) = bf16(v * lift_of(f));
}
// The same of four from c on, c a multiple of 4: their two words, and where those lie.
__device__ __forceinline__ void words4(WeightFormat f, const float (&v)[4], uint32_t& a, uint32_t& b) {
  const bool fp8 = f == WeightFormat::fp8;
  const float lift = lift_of(f);
  a = ptx::pack(bf16{}, v[0] * lift, (fp8 ? v[2] : v[1]) * lift);
  b = ptx::pack(bf16{}, (fp8 ? v[1] : v[2]) * lift, v[3] * lift);
}
__device__ __forceinline__ void put_words4(char* column, WeightFormat f, uint32_t c, uint32_t a, uint32_t b) {
  const bool fp8 = f == WeightFormat::fp8;
  *reinterpret_cast<uint32_t*>(column + 2 * place(fp8, c)) = a;
  *reinterpret_cast<uint32_t*>(column + 2 * place(fp8, c + (fp8 ? 1 : 2))) = b;
}

// Columns from C on are read as zero. x is fp32, read past L1, as an earlier kernel wrote it.
__device__ __forceinline__ void load4(const float* x, uint32_t c, uint32_t C, float (&v)[4]) {
  if (c + 3 < C) {
    const float4 f = __ldcg(reinterpret_cast<const float4*>(x + c));
    v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
  } else {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) v[i] = c + i < C ? __ldcg(x + c + i) : 0;
  }
}
__device__ __forceinline__ float lanes_sum(float v) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) v += __shfl_xor_sync(~0u, v, mask);
  return v;
}

// Rows of x times the norm's weight become columns; their sums of squares are left in `squares`, a part a warp, for
// whoever divides by the root mean square in the end: both can then be read at once. Weight tiles [first, end) only.
// x's rows and `weight` are 16-byte aligned.
template <WeightFormat F, int kCols>
__device__ __forceinline__ void stage_normed(char* columns, uint32_t stride, const float* x, int64_t x_stride,
                                             const float* weight, uint32_t C, uint32_t T, uint32_t first, uint32_t end,
                                             float (&squares)[kWarps][kCols]) {
  constexpr uint32_t kStep = 4 * kThreads;
  constexpr int kRows = kCols == 1 ? 1 : 8, kHeld = kCols == 1 ? 3 : 1;  // that are on their way at once
  for (uint32_t j = 0; j < T; j += kRows) {
    float sum[kRows] = {};
    for (uint32_t from = 64 * first + 4 * threadIdx.x; from < 64 * end; from += kHeld * kStep) {
      float v[kHeld][kRows][4] = {}, w[kHeld][4] = {};
#pragma unroll
      for (int u = 0; u < kHeld; ++u) {
        if (from + u * kStep >= 64 * end) continue;
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          if (kRows == 1 || j + r < T) load4(x + (j + r) * x_stride, from + u * kStep, C, v[u][r]);
        load4(weight, from + u * kStep, C, w[u]);
      }
#pragma unroll
      for (int u = 0; u < kHeld; ++u) {
        if (from + u * kStep >= 64 * end) continue;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (kRows > 1 && j + r >= T) continue;
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sum[r] += v[u][r][i] * v[u][r][i];
            v[u][r][i] *= w[u][i];
          }
          put4<F>(columns + (j + r) * stride, from + u * kStep, v[u][r]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (kRows > 1 && j + r >= T) continue;
      sum[r] = lanes_sum(sum[r]);
      if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32][j + r] = sum[r];
    }
  }
}
template <int kCols> __device__ __forceinline__ float sum_of(const float (&squares)[kWarps][kCols], uint32_t j) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += squares[w][j];
  return sum;
}
// Columns that lie in global memory in their order already.
__device__ __forceinline__ void stage_columns(char* columns, uint32_t stride, const char* from, uint32_t C,
                                              uint32_t T) {
  constexpr int kHeld = 6;  // pieces of 16 bytes on their way at once
  const uint32_t pieces = uint32_t(column_bytes(C)) / 16, all = T * pieces;
  for (uint32_t first = threadIdx.x; first < all; first += kHeld * kThreads) {
    uint4 held[kHeld] = {};  // what is not loaded must not stay from before, in registers
#pragma unroll
    for (int u = 0; u < kHeld; ++u)
      if (first + u * kThreads < all) held[u] = __ldcg(reinterpret_cast<const uint4*>(from) + first + u * kThreads);
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const uint32_t i = first + u * kThreads;
      if (i < all) *reinterpret_cast<uint4*>(columns + i / pieces * stride + i % pieces * 16) = held[u];
    }
  }
}

// --- weight tiles

template <WeightFormat F> struct Stored {
  uint32_t word[F == WeightFormat::bf16 ? 4 : F == WeightFormat::fp8 ? 2 : 1][4];
  uint32_t scales = 0;
};
template <WeightFormat F>
__device__ __forceinline__ void load(Stored<F>& s, const uint8_t* weight_tile, uint32_t lane) {
  constexpr int kWords = sizeof(s.word) / 16;
#pragma unroll
  for (int i = 0; i < kWords; ++i) ptx::load_streaming(weight_tile + i * 512 + lane * 16, s.word[i]);
  if constexpr (F == WeightFormat::mxfp4) {
    uint32_t w[1];
    ptx::load_streaming(weight_tile + 512 + lane / 4 * 4, w);
    s.scales = w[0];
  }
}

// Bytes 0 and 2 of a word, and bytes 1 and 3, times 2^-120.
__device__ __forceinline__ uint32_t even_of_fp8(uint32_t w) {
  return ((w << 8) & 0x80008000u) | ((w << 4) & 0x07f007f0u);
}
__device__ __forceinline__ uint32_t odd_of_fp8(uint32_t w) { return (w & 0x80008000u) | ((w >> 4) & 0x07f007f0u); }
// 2^(s - 127) of byte i; zero for s = 0, which stands for 2^-127, and infinity for 255, which stands for NaN.
__device__ __forceinline__ float scale_of(uint32_t scales, int i) {
  return __uint_as_float((scales >> (8 * i) & 0xff) << 23);
}

// sum += weight tile times columns. `columns` are this lane's: of column g of every 8, from the t-th 16 bytes on.
template <WeightFormat F, int kBlocks>
__device__ __forceinline__ void multiply(const Stored<F>& s, const char* const (&columns)[kBlocks], uint32_t at,
                                         float (&sum)[kBlocks][4]) {
#pragma unroll
  for (int plane = 0; plane < 2; ++plane) {
    uint4 b[kBlocks];
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) b[k] = *reinterpret_cast<const uint4*>(columns[k] + at + plane * 64);
    float part[kBlocks][4] = {};
    float(&d)[kBlocks][4] = F == WeightFormat::mxfp4 ? part : sum;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[4];
      if constexpr (F == WeightFormat::bf16) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = s.word[2 * plane + half][i];
      } else if constexpr (F == WeightFormat::fp8) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          a[i] = even_of_fp8(s.word[plane][2 * half + i]);
          a[2 + i] = odd_of_fp8(s.word[plane][2 * half + i]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = two_of_mxfp4(s.word[0][2 * plane + half], i);
      }
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
        const uint32_t two[2] = {half == 0 ? b[k].x : b[k].z, half == 0 ? b[k].y : b[k].w};
        ptx::mma_m16n8k16(bf16{}, d[k], a, two);
      }
    }
    if constexpr (F == WeightFormat::mxfp4) {
      const float low = scale_of(s.scales, 2 * plane), high = scale_of(s.scales, 2 * plane + 1);
#pragma unroll
      for (int k = 0; k < kBlocks; ++k) {
        sum[k][0] += part[k][0] * low, sum[k][1] += part[k][1] * low;
        sum[k][2] += part[k][2] * high, sum[k][3] += part[k][3] * high;
      }
    }
  }
}

// This lane's columns: of one column alone, every lane's is that one, and all columns of the product are equal.
template <int kBlocks>
__device__ __forceinline__ void lane_columns(const char* columns, int64_t stride, uint32_t T,
                                             const char* (&mine)[kBlocks]) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    const uint32_t j = min(uint32_t(8 * k) + lane / 4, T - 1);
    mine[k] = columns + j * stride + lane % 4 * 16;
  }
}
// A warp's weight tiles, band after band: while some are multiplied the next are on their way, those of the next band
// too. Of a band it takes weight tiles first, first + kWarps, ...
template <WeightFormat F> class Feed {
 public:
  struct Band {
    const uint8_t* data = nullptr;  // null: there is none
    uint32_t first = 0, end = 0;
  };
  __device__ __forceinline__ void ask(Band band) {
    if (band.data == nullptr) return;
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t u = 0; u < kAhead; ++u)
      if (band.first + u * kWarps < band.end)
        load<F>(next_[u], band.data + size_t(band.first + u * kWarps) * Form<F>::kBytes, lane);
  }
  // sum += a band that was asked for; asks for the following one.
  template <int kBlocks>
  __device__ __forceinline__ void multiply_band(Band band, const Band& following, const char* const (&columns)[kBlocks],
                                                float (&sum)[kBlocks][4]) {
    for (bool more = true; more;) {
      Stored<F> now[kAhead];
#pragma unroll
      for (uint32_t u = 0; u < kAhead; ++u) now[u] = next_[u];
      const uint32_t first = band.first;
      band.first += kAhead * kWarps;
      more = band.first < band.end;
      ask({more ? band.data : following.data, more ? band.first : following.first, more ? band.end : following.end});
#pragma unroll
      for (uint32_t u = 0; u < kAhead; ++u)
        if (first + u * kWarps < band.end) multiply<F>(now[u], columns, (first + u * kWarps) * kColumnBytes, sum);
    }
  }

 private:
  static constexpr uint32_t kAhead = Form<F>::kAhead;
  Stored<F> next_[kAhead];
};
// The scales of a band's rows g and g + 8, which follow its weight tiles.
__device__ __forceinline__ void load_row_scales(const uint8_t* band, uint32_t weight_tiles, float (&scale)[2]) {
  const float* s = reinterpret_cast<const float*>(band + size_t(weight_tiles) * Form<WeightFormat::fp8>::kBytes);
  const uint32_t g = threadIdx.x % 32 / 4;
  scale[0] = s[g], scale[1] = s[g + 8];
}

// --- sums of a block's warps. Two units in turn: whoever writes the sums of unit n + 2 has passed the barrier of n +
// 1, which those who read n's came to after reading.
template <int kCols> struct Sums { float part[2][kWarps][16][kCols]; };
template <int kCols>
__device__ __forceinline__ void put_sums(float (&to)[kWarps][16][kCols], const float (&sum)[(kCols + 7) / 8][4]) {
  const uint32_t warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  if constexpr (kCols == 1) {
    if (t == 0) to[warp][g][0] = sum[0][0], to[warp][g + 8][0] = sum[0][2];
  } else {
#pragma unroll
    for (int k = 0; k < kCols / 8; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) to[warp][g + i / 2 * 8][8 * k + 2 * t + i % 2] = sum[k][i];
  }
}
template <int kCols>
__device__ __forceinline__ float total(const float (&from)[kWarps][16][kCols], uint32_t row, uint32_t col) {
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += from[w][row][col];
  return sum;
}

}  // namespace ingot::weight_tiles
