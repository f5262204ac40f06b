#pragma once
// Attention's operations on the accumulators of products. The accumulators of wgmma (ptx/wgmma.cuh) and of mma
// (ptx/mma.cuh) have the same layout for the 16 rows of a warp: thread 4 g + t holds columns 8 j + 2 t and 8 j + 2 t +
// 1 of every eight columns j, those of row g in d[4 j] and d[4 j + 1], those of row g + 8 in d[4 j + 2] and d[4 j + 3].
#include <cstdint>

#include "ingot/core/dtype.h"
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/math.cuh"
#include "ingot/kernels/attention/parts/walk.h"

namespace ingot::cuda::attention_parts {

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

constexpr float kLog2E = 1.44269504f;

// out * tanh(in * score), or in * score without a cap. The exponent is never positive; for large arguments tanh is
// exactly 1.
__device__ __forceinline__ float capped(float score, float in, float out) {
  const float x = score * in;
  if (out == 0) return x;
  const float e = ptx::exp2_approx(-2 * kLog2E * fabsf(x));
  return copysignf(out * ((1 - e) * ptx::reciprocal_approx(1 + e)), x);
}

// The probability P of a score, and the slope of the cap at the score. `lse` is given to base 2.
struct Probability {
  float value, slope;
};
template <bool kCapped>
__device__ __forceinline__ Probability probability(const ScoreParams& p, float score, float lse) {
  if constexpr (!kCapped) return {ptx::exp2_approx(score * p.scale_log2 - lse), 1.f};
  const float x = capped(score, p.cap_in, p.cap_out), part = p.cap_out == 0 ? 0.f : x / p.cap_out;
  return {ptx::exp2_approx(x - lse), 1 - part * part};
}

// Packs d into the register operand A of products whose sums run over the columns of d, 16 columns at a time.
template <class T, int N> __device__ __forceinline__ void pack_operand(uint32_t (&a)[N / 8][4], const float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N / 8; ++i)
#pragma unroll
    for (int r = 0; r < 4; ++r) a[i][r] = ptx::pack(T{}, d[8 * i + 2 * r], d[8 * i + 2 * r + 1]);
}

// Transposes words within a quad, whose lanes hold a row each, so that each lane holds a column: lane t's w[i] becomes
// lane i's w[t].
__device__ __forceinline__ void transpose_in_quad(uint32_t (&w)[4], uint32_t t) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const bool upper = t & bit;
      const uint32_t received = __shfl_xor_sync(~0u, upper ? w[i] : w[i + bit], bit);
      if (upper)
        w[i] = received;
      else
        w[i + bit] = received;
    }
}

// Stores rows g and g + 8 of an accumulator tile, times `scale`, in T, 16 bytes per lane. row[r] is the start of the
// row, or null. `width` is the number of columns, a multiple of 8. With `adds` the result is added to the old values.
template <class T, int N>
__device__ __forceinline__ void store_rows(const float (&d)[N], const float (&scale)[2], T* const (&row)[2], int width,
                                           uint32_t t, bool adds = false) {
#pragma unroll
  for (int i = 0; i < N / 16; ++i)  // 32 columns
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t w[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = 16 * i + 4 * j + 2 * r;
        w[j] = ptx::pack(T{}, d[at] * scale[r], d[at + 1] * scale[r]);
      }
      transpose_in_quad(w, t);
      const int column = 32 * i + 8 * int(t);
      if (row[r] == nullptr || column >= width) continue;
      uint4* const to = reinterpret_cast<uint4*>(row[r] + column);
      if (adds) {
        const uint4 there = *to;
        const uint32_t old[4] = {there.x, there.y, there.z, there.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          float a, b, x, y;
          ptx::unpack(T{}, old[j], a, b);
          ptx::unpack(T{}, w[j], x, y);
          w[j] = ptx::pack(T{}, a + x, b + y);
        }
      }
      *to = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

}  // namespace ingot::cuda::attention_parts
