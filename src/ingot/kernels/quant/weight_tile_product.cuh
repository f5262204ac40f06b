#pragma once
// Products of weight tiles (weight_tiles.h) with a few activation vectors, on tensor cores: the block's warps share a
// row tile's weight tiles, and their sums meet in shared memory.
//   sum[r, j] = sum_c w[r, c] x[j, c]        r < 16 rows of a row tile, j < 1, 8 or 16 activation vectors
// An activation vector is a row of bf16 activations in the lanes' reading order: 128 bytes for 64 numbers, two planes
// of 4 x 16 bytes, where lane 4 g + t reads part t. fp8 and mxfp4 codes become bf16 only by moving bits, which makes
// the numbers smaller by a power of two. Activation vectors are made larger by another power of two (kInputScale), so
// that no product is subnormal. kOutputScale undoes both factors.
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
  static constexpr float kInputScale = 1, kOutputScale = 1;
  static constexpr int kAhead = 2;  // weight tiles requested ahead by a multiplying warp
};
template <> struct Form<WeightFormat::fp8> {
  static constexpr uint32_t kBytes = 1024;
  static constexpr float kInputScale = 0x1p64f,
                         kOutputScale = 0x1p56f;  // e4m3's exponent counts from 7, bf16's from 127
  static constexpr int kAhead = 3;
};
template <> struct Form<WeightFormat::mxfp4> {
  static constexpr uint32_t kBytes = 544;
  static constexpr float kInputScale = 0x1p64f, kOutputScale = 0x1p62f;
  static constexpr int kAhead = 6;
};

// --- activation vectors

constexpr uint32_t kVectorTileBytes = 128;  // of a weight tile
INGOT_HD constexpr uint32_t padded(uint32_t numbers) { return (numbers + 63) / 64 * 64; }
INGOT_HD constexpr int64_t vector_bytes(uint32_t numbers) { return int64_t(padded(numbers)) * 2; }
// For shared memory: with this stride the lanes of neighbouring activation vectors read different banks.
INGOT_HD constexpr uint32_t vector_stride(uint32_t numbers) { return (padded(numbers) * 2 + 127) / 128 * 128 + 64; }
// The place of number c in an activation vector, counted in numbers. Number c shares a word with c + 1, for fp8 with c
// + 2.
INGOT_HD constexpr uint32_t place(bool fp8, uint32_t c) {
  const uint32_t first = c / 64 * 64, i = c % 64;
  return fp8 ? first + i / 32 * 32 + i % 16 / 4 * 8 + (i % 32 / 16 * 2 + i % 2) * 2 + i % 4 / 2
             : first + i / 32 * 32 + i % 8 / 2 * 8 + (i / 16 % 2 * 2 + i % 16 / 8) * 2 + i % 2;
}

// Writes four numbers from c on, c a multiple of 4.
template <WeightFormat F> __device__ __forceinline__ void put4(char* vector, uint32_t c, const float (&v)[4]) {
  constexpr bool kFp8 = F == WeightFormat::fp8;
  constexpr float kInputScale = Form<F>::kInputScale;
  const uint32_t a = kFp8 ? ptx::pack(bf16{}, v[0] * kInputScale, v[2] * kInputScale)
                          : ptx::pack(bf16{}, v[0] * kInputScale, v[1] * kInputScale);
  const uint32_t b = kFp8 ? ptx::pack(bf16{}, v[1] * kInputScale, v[3] * kInputScale)
                          : ptx::pack(bf16{}, v[2] * kInputScale, v[3] * kInputScale);
  *reinterpret_cast<uint32_t*>(vector + 2 * place(kFp8, c)) = a;
  *reinterpret_cast<uint32_t*>(vector + 2 * place(kFp8, c + (kFp8 ? 1 : 2))) = b;
}
INGOT_HD constexpr float input_scale_of(WeightFormat f) { return f == WeightFormat::bf16 ? 1.f : 0x1p64f; }
__device__ __forceinline__ void put(char* vector, WeightFormat f, uint32_t c, float v) {
  *reinterpret_cast<bf16*>(vector + 2 * place(f == WeightFormat::fp8, c)) = bf16(v * input_scale_of(f));
}
// The two words of four numbers from c on, c a multiple of 4.
__device__ __forceinline__ void words4(WeightFormat f, const float (&v)[4], uint32_t& a, uint32_t& b) {
  const bool fp8 = f == WeightFormat::fp8;
  const float lift = input_scale_of(f);
  a = ptx::pack(bf16{}, v[0] * lift, (fp8 ? v[2] : v[1]) * lift);
  b = ptx::pack(bf16{}, (fp8 ? v[1] : v[2]) * lift, v[3] * lift);
}
__device__ __forceinline__ void put_words4(char* vector, WeightFormat f, uint32_t c, uint32_t a, uint32_t b) {
  const bool fp8 = f == WeightFormat::fp8;
  *reinterpret_cast<uint32_t*>(vector + 2 * place(fp8, c)) = a;
  *reinterpret_cast<uint32_t*>(vector + 2 * place(fp8, c + (fp8 ? 1 : 2))) = b;
}

// Numbers from C on are zero. x is fp32 and read past L1, because an earlier kernel wrote it.
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

// Writes rows of x times the norm's weight as activation vectors, for the weight tiles [first, end). Writes their sums
// of squares to `squares`, a part for each warp: the epilogue divides by the root mean square, so x is read only once.
// The rows of x and `weight` are 16-byte aligned.
template <WeightFormat F, int kCols>
__device__ __forceinline__ void stage_normed(char* vectors, uint32_t stride, const float* x, int64_t x_stride,
                                             const float* weight, uint32_t C, uint32_t T, uint32_t first, uint32_t end,
                                             float (&squares)[kWarps][kCols]) {
  constexpr uint32_t kStep = 4 * kThreads;
  constexpr int kRows = kCols == 1 ? 1 : 8,
                kHeld = kCols == 1 ? 3 : 1;  // vectors, and words of a vector, requested together
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
          put4<F>(vectors + (j + r) * stride, from + u * kStep, v[u][r]);
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
// Copies activation vectors without reordering.
__device__ __forceinline__ void stage_vectors(char* vectors, uint32_t stride, const char* from, uint32_t C,
                                              uint32_t T) {
  constexpr int kHeld = 6;  // 16-byte words requested together
  const uint32_t pieces = uint32_t(vector_bytes(C)) / 16, all = T * pieces;
  for (uint32_t first = threadIdx.x; first < all; first += kHeld * kThreads) {
    uint4 held[kHeld] = {};  // zeros: a register must not keep an earlier word
#pragma unroll
    for (int u = 0; u < kHeld; ++u)
      if (first + u * kThreads < all) held[u] = __ldcg(reinterpret_cast<const uint4*>(from) + first + u * kThreads);
#pragma unroll
    for (int u = 0; u < kHeld; ++u) {
      const uint32_t i = first + u * kThreads;
      if (i < all) *reinterpret_cast<uint4*>(vectors + i / pieces * stride + i % pieces * 16) = held[u];
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
// The factor 2^(s - 127) of byte i. s = 0 stands for 2^-127 and gives zero; 255 stands for NaN and gives infinity.
__device__ __forceinline__ float scale_of(uint32_t scales, int i) {
  return __uint_as_float((scales >> (8 * i) & 0xff) << 23);
}

// sum += weight tile times activation vectors. `vectors` are this lane's: vector g of every 8, from the t-th 16 bytes
// on.
template <WeightFormat F, int kBlocks>
__device__ __forceinline__ void multiply(const Stored<F>& s, const char* const (&vectors)[kBlocks], uint32_t at,
                                         float (&sum)[kBlocks][4]) {
#pragma unroll
  for (int plane = 0; plane < 2; ++plane) {
    uint4 b[kBlocks];
#pragma unroll
    for (int k = 0; k < kBlocks; ++k) b[k] = *reinterpret_cast<const uint4*>(vectors[k] + at + plane * 64);
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

// This lane's activation vectors. With a single token every lane reads the same vector, and all columns of the product
// are equal.
template <int kBlocks>
__device__ __forceinline__ void lane_vectors(const char* vectors, int64_t stride, uint32_t T,
                                             const char* (&mine)[kBlocks]) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < kBlocks; ++k) {
    const uint32_t j = min(uint32_t(8 * k) + lane / 4, T - 1);
    mine[k] = vectors + j * stride + lane % 4 * 16;
  }
}
// A warp's weight tiles, row tile after row tile: first, first + kWarps, ... of each. While some weight tiles are
// multiplied, the next ones are being loaded, also across row tiles.
template <WeightFormat F> class Feed {
 public:
  struct RowTile {
    const uint8_t* data = nullptr;  // null: no row tile
    uint32_t first = 0, end = 0;
  };
  __device__ __forceinline__ void ask(RowTile row_tile) {
    if (row_tile.data == nullptr) return;
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (uint32_t u = 0; u < kAhead; ++u)
      if (row_tile.first + u * kWarps < row_tile.end)
        load<F>(next_[u], row_tile.data + size_t(row_tile.first + u * kWarps) * Form<F>::kBytes, lane);
  }
  // sum += an already requested row tile; requests the following row tile.
  template <int kBlocks>
  __device__ __forceinline__ void multiply_row_tile(RowTile row_tile, const RowTile& following,
                                                    const char* const (&vectors)[kBlocks], float (&sum)[kBlocks][4]) {
    for (bool more = true; more;) {
      Stored<F> now[kAhead];
#pragma unroll
      for (uint32_t u = 0; u < kAhead; ++u) now[u] = next_[u];
      const uint32_t first = row_tile.first;
      row_tile.first += kAhead * kWarps;
      more = row_tile.first < row_tile.end;
      ask({more ? row_tile.data : following.data, more ? row_tile.first : following.first,
           more ? row_tile.end : following.end});
#pragma unroll
      for (uint32_t u = 0; u < kAhead; ++u)
        if (first + u * kWarps < row_tile.end)
          multiply<F>(now[u], vectors, (first + u * kWarps) * kVectorTileBytes, sum);
    }
  }

 private:
  static constexpr uint32_t kAhead = Form<F>::kAhead;
  Stored<F> next_[kAhead];
};
// The scales of rows g and g + 8, stored after the weight tiles of a row tile.
__device__ __forceinline__ void load_row_scales(const uint8_t* row_tile, uint32_t weight_tiles, float (&scale)[2]) {
  const float* s = reinterpret_cast<const float*>(row_tile + size_t(weight_tiles) * Form<WeightFormat::fp8>::kBytes);
  const uint32_t g = threadIdx.x % 32 / 4;
  scale[0] = s[g], scale[1] = s[g + 8];
}

// --- the sums of a block's warps, for two units in turn: before writing the sums of unit n + 2 a warp passes the
// barrier of unit n + 1, which follows all reads of unit n.
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
