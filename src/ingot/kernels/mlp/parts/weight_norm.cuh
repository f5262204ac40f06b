#pragma once
// Weight norm inside the kernels: the scale of a row of W, and scaling of the row on loading. weight_inverse_norm() and
// formed_weights.cu have the same bits for 16-bit rows of up to 256 elements. Code that adds the squares in a different
// order, such as weight_norm_tile.cuh and to_512/few_rows.cuh, may give scales that differ in the last bits.
#include <cstdint>

#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/gpu/tile/vec.cuh"

namespace ingot::cuda::mlp_parts {

constexpr float kWeightNormEps = 1e-12f;

// 16 bytes of a weight row.
template <class T> using WeightChunk = tile::Vec<T, 16 / int(sizeof(T))>;

// The sum of squares of a chunk, and 1 / |v| from the sum over a row. to_128/many_rows.cuh distributes a row over lanes
// in a different way than weight_inverse_norm(), but adds the chunks in the same order (by exchanges over bits 3 to 0
// of the chunk's number), and so gets the same bits.
template <class T> __device__ inline float squares(const WeightChunk<T>& v) {
  constexpr int kPer = 16 / int(sizeof(T));
  float x[kPer], sum = 0;
  tile::to_float(v, x);
#pragma unroll
  for (int i = 0; i < kPer; ++i) sum = fmaf(x[i], x[i], sum);
  return sum;
}
__device__ inline float inverse_norm(float squares) { return __frsqrt_rn(squares + kWeightNormEps); }

// 1 / sqrt(|v|^2 + eps) of a row of K elements (a multiple of 8), computed by a whole warp for every lane.
template <class T> __device__ inline float weight_inverse_norm(const T* v, int K) {
  constexpr int kPer = 16 / int(sizeof(T));
  float sum[1] = {};
  for (int k = int(threadIdx.x % 32) * kPer; k < K; k += 32 * kPer) {
    WeightChunk<T> chunk;
    tile::load(chunk, v + k);
    float x[kPer];
    tile::to_float(chunk, x);
#pragma unroll
    for (int i = 0; i < kPer; ++i) sum[0] = fmaf(x[i], x[i], sum[0]);
  }
  tile::warp_sum(sum, 32);
  return inverse_norm(sum[0]);
}
// W = scale v, formed in fp32 and rounded to T.
template <class T> __device__ inline WeightChunk<T> scaled(const WeightChunk<T>& v, float scale) {
  constexpr int kPer = 16 / int(sizeof(T));
  float x[kPer];
  tile::to_float(v, x);
#pragma unroll
  for (int i = 0; i < kPer; ++i) x[i] *= scale;
  return tile::from_float<T>(x);
}

}  // namespace ingot::cuda::mlp_parts
