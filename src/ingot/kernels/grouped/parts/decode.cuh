#pragma once
// Decodes weight tiles in shared memory into the left operand of tensor core products, in registers.
//
// Shifts and masks turn codes of 4 and 8 bits into bf16 numbers that are too small by factors of 2^126 and 2^120. One
// multiplication applies the block's scale and most of this factor. The rest of the factor, kOutputScale, is applied to
// the sums, so that large scales stay in bf16's range.
#ifndef INGOT_EMULATE
#include <cuda_bf16.h>
#endif

#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/multiply.cuh"
#include "ingot/kernels/quant/weight_tile_product.cuh"

namespace ingot::grouped {

template <WeightFormat F> constexpr float kOutputScale = 1;
template <> constexpr float kOutputScale<WeightFormat::fp8> = 0x1p60f;
template <> constexpr float kOutputScale<WeightFormat::mxfp4> = 0x1p64f;

// Decodes kSteps steps of 16 columns of a weight tile in shared memory into A operands, from step kFirst on. `kept`
// holds the words that the first steps read and the later steps need.
struct Kept {
  uint32_t codes[4], scales[2];
};
// 2^(s - 65) of two bytes in 16 bits each; infinity where the power is beyond bf16.
__device__ __forceinline__ uint32_t two_scales(uint32_t two) { return __vminu2(two, 0x00c100c1u) * 0x80 + 0x1f001f00u; }
// Multiplies both halves of a by one half of b: ptxas emits one instruction for this form, but not for a permutation.
__device__ __forceinline__ uint32_t multiply_by_half(uint32_t a, uint32_t b, int half) {
#ifdef INGOT_EMULATE
  const uint32_t one = b >> (half * 16) & 0xffff;
  return ptx::multiply_bf16x2(a, one << 16 | one);
#else
  const auto two = [](uint32_t v) { return *reinterpret_cast<const __nv_bfloat162*>(&v); };
  const __nv_bfloat162 scale = half == 0 ? __low2bfloat162(two(b)) : __high2bfloat162(two(b));
  const __nv_bfloat162 product = __hmul2_rn(two(a), scale);
  return *reinterpret_cast<const uint32_t*>(&product);
#endif
}
template <WeightFormat F, int kSteps>
__device__ __forceinline__ void decode(uint32_t weight_tile, int first, Kept& kept, uint32_t (&a)[kSteps][4]) {
  const uint32_t lane = threadIdx.x % 32;
  if constexpr (F == WeightFormat::bf16) {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) ptx::load_shared(a[s], weight_tile + (first + s) * 512 + lane * 16);
  } else if constexpr (F == WeightFormat::mxfp4) {
    if (first == 0) {
      uint32_t scales[1];
      ptx::load_shared(kept.codes, weight_tile + lane * 16);
      ptx::load_shared(scales, weight_tile + 512 + lane / 4 * 4);
      kept.scales[0] = two_scales(scales[0] & 0x00ff00ffu);  // of row g, both blocks of 32 columns
      kept.scales[1] = two_scales(__byte_perm(scales[0], 0, 0x4341));
    }
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[s][i] =
            multiply_by_half(weight_tiles::two_of_mxfp4(kept.codes[first + s], i), kept.scales[i & 1], (first + s) / 2);
  } else {
    // In a weight tile a lane holds four neighbouring columns, as 8-bit products need; 16-bit products take two
    // neighbouring columns and the two columns 8 further.
    constexpr uint32_t kUp = 0x5d805d80;  // 2^60
    const uint32_t g = lane / 4, t = lane % 4;
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t holder = 4 * g + i / 2 * 2 + t / 2, word = (first + s) % 2 * 2 + (i & 1);
        uint32_t w[1];
        ptx::load_shared(w, weight_tile + (first + s) / 2 * 512 + holder * 16 + word * 4);
        const uint32_t two = w[0] >> (t % 2 * 16);
        a[s][i] = ptx::multiply_bf16x2(weight_tiles::even_of_fp8((two & 0xff) | (two & 0xff00) << 8), kUp);
      }
  }
}

}  // namespace ingot::grouped
