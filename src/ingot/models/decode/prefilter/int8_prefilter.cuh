#pragma once
// The product of a weight tile of codes, and the comparison of bounds (int8_prefilter.h derives the bound).
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/mma.cuh"
#include "ingot/models/decode/prefilter/int8_prefilter.h"

namespace ingot::decode::prefilter {

// The masks that turn bytes 0 and 2 of a word, or bytes 1 and 3, into two bf16.
constexpr uint32_t kSign = 0x80008000u, kCode = 0x03f803f8u, kOnes = 0x3c003c00u;
__device__ __forceinline__ uint32_t even(uint32_t w) { return ((w << 8) & kSign) | ((w << 3) & kCode) | kOnes; }
__device__ __forceinline__ uint32_t odd(uint32_t w) { return (w & kSign) | ((w >> 5) & kCode) | kOnes; }

// sum += a weight tile of codes times an activation vector of bf16 (weight_tile_product.cuh); `vector` points to this
// lane's part.
__device__ __forceinline__ void multiply(const char* weight_tile, const char* vector, uint32_t lane, float (&sum)[4]) {
#pragma unroll
  for (uint32_t plane = 0; plane < 2; ++plane) {
    const uint4 w = *reinterpret_cast<const uint4*>(weight_tile + plane * 512 + lane * 16),
                b = *reinterpret_cast<const uint4*>(vector + plane * 64);
    const uint32_t first[4] = {even(w.x), even(w.y), odd(w.x), odd(w.y)},
                   second[4] = {even(w.z), even(w.w), odd(w.z), odd(w.w)}, low[2] = {b.x, b.y}, high[2] = {b.z, b.w};
    ptx::mma_m16n8k16(bf16{}, sum, first, low);
    ptx::mma_m16n8k16(bf16{}, sum, second, high);
  }
}

// Maps floats to unsigned integers of the same order; 0 is below all of them.
__device__ __forceinline__ uint32_t ordered(float v) {
  const uint32_t u = __float_as_uint(v + 0.f);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

// The factor of a token's activation vector in all bounds.
struct Vector {
  float norm, output_scale;
};
// A norm gives no bound if its square may have overflowed, or may be too small because numbers were flushed to zero.
__device__ __forceinline__ Vector vector_of(float squares, float output_scale) {
  const bool sound = squares > 0x1p-100f && squares < 0x1p100f;
  return {sound ? sqrtf(squares) * (1 + 0x1p-10f) : INFINITY, output_scale};
}
// A sum of logit and noise is at most `upper` and, where `lower` is not 0, at least `lower`, a value of ordered().
// Adding the noise to the bounds of the logit bounds the sum, because the noise is the same and rounding keeps the
// order of numbers.
struct Range {
  float upper;
  uint32_t lower;
};
__device__ __forceinline__ Range range_of(float sum, const PrefilterRow& row, const Vector& x,
                                          const sampling::RowNoise& sampled, float noise) {
  constexpr float kSafe = 0x1p100f, kFlushed = 0x1p-100f, kUp = 1 + 0x1p-18f;
  const float error = x.norm * row.bound * kUp, logit = sum * row.scale * x.output_scale,
              bound = (x.output_scale * (error + kFlushed) + kFlushed) * kUp;
  if (!(error < kSafe && bound < kSafe)) return {INFINITY, 0};
  return {sampled.sum(noise, logit + bound), ordered(sampled.sum(noise, logit - bound))};
}

// Lies in shared memory behind the activation vector.
constexpr uint32_t kRounds = 8;  // rounds whose bounds are compared together
template <uint32_t kWarps, uint32_t kBands> struct Memory {
  float squares[kWarps];
  uint32_t lower[kWarps], largest[kWarps];
  uint32_t count;
  uint2 found[kRounds * kBands];  // row tiles to read in bf16, and a bit for each of their 16 rows
};

}  // namespace ingot::decode::prefilter
