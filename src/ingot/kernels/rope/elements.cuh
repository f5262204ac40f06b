#pragma once
// The kernels that read and write element by element: for any alignment and any number of dimensions.
#include <cstdint>

#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/kernels/rope/rope_config.h"
#include "ingot/kernels/rope/rope_params.cuh"
#include "ingot/kernels/rope/rotated_pairs.cuh"
#include "ingot/kernels/rope/token_walk.cuh"

namespace ingot::cuda::rope_kernels {

// Calls rotate(element 1, element 2, cos, sin) for a lane's pairs, then pass(element) for its dimensions without
// rotation. A lane visits the same elements in every call, so results may overwrite operands.
template <class Rotate, class Pass>
__device__ inline void for_each_element(const RopeParams& p, int64_t token, uint32_t lane, Rotate&& rotate,
                                        Pass&& pass) {
  if (p.half > 0) {
    const int64_t row = table_row(p, p.positions[token]);
    for (uint32_t j = lane; j < p.half; j += p.lanes) {
      const uint32_t one = p.interleaved ? 2 * j : j, two = p.interleaved ? one + 1 : j + p.half;
      rotate(one, two, p.cos[row + j], p.sin[row + j] * p.sign);
    }
  }
  for (uint32_t c = 2 * p.half + lane; c < p.head_dim; c += p.lanes) pass(c);
}

// Elements `one` and `two` of a head, which are a pair, after the rotation.
struct RotatedPair {
  float a, b;
};
template <class T>
__device__ inline RotatedPair rotated(const T* head, uint32_t one, uint32_t two, float cos, float sin) {
  RotatedPair pair{tile::to_float(head[one]), tile::to_float(head[two])};
  rotate_pair(pair.a, pair.b, cos, sin);
  return pair;
}

template <class T>
__global__ void __launch_bounds__(kRopeThreads) rotate_elements(const __grid_constant__ RopeParams p) {
  if (p.early) ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t unit = blockIdx.x * blockDim.x + threadIdx.x;
  const tile::Division lane = tile::divide(unit, p.by_lanes), head = tile::divide(lane.quotient, p.by_heads);
  const int64_t token = p.first_token + head.quotient;
  const bool ok = unit < p.units;
  const T* x = head_of<const T>(p.x, token, head.remainder);
  T* y = head_of<T>(p.y, token, head.remainder);

  float factor = 1;
  if (p.normalise) {
    float sum[1] = {};
    if (ok)
      for (uint32_t c = lane.remainder; c < p.head_dim; c += p.lanes) {
        const float value = tile::to_float(x[c]);
        sum[0] += value * value;
      }
    tile::warp_sum(sum, p.lanes);
    factor = rstd_of(sum[0], p);
  }
  if (!ok) return;
  if (p.gain != nullptr) factor *= p.gain[head.remainder];
  for_each_element(
      p, token, lane.remainder,
      [&](uint32_t one, uint32_t two, float cos, float sin) {
        const RotatedPair g = rotated(x, one, two, cos, sin);
        y[one] = tile::from_float<T>(g.a * factor);
        y[two] = tile::from_float<T>(g.b * factor);
      },
      [&](uint32_t c) { y[c] = tile::from_float<T>(tile::to_float(x[c]) * factor); });
}

template <class T>
__device__ inline void backward_element_head(const RopeParams& p, int64_t token, bool ok, uint32_t head, uint32_t lane,
                                             float& dgain) {
  const T *x = head_of<const T>(p.x, token, head), *dy = head_of<const T>(p.dy, token, head);
  T* dx = head_of<T>(p.y, token, head);
  float sum[2] = {};  // sums of x * x and of x * g
  if (ok)
    for_each_element(
        p, token, lane,
        [&](uint32_t one, uint32_t two, float cos, float sin) {
          const RotatedPair g = rotated(dy, one, two, cos, sin);
          const float xa = tile::to_float(x[one]), xb = tile::to_float(x[two]);
          sum[0] += xa * xa + xb * xb;
          sum[1] += xa * g.a + xb * g.b;
        },
        [&](uint32_t c) {
          const float value = tile::to_float(x[c]);
          sum[0] += value * value;
          sum[1] += value * tile::to_float(dy[c]);
        });
  tile::warp_sum(sum, p.lanes);
  if (!ok) return;
  const float rstd = p.normalise ? rstd_of(sum[0], p) : 1.f, n_dot_g = sum[1] * rstd;
  dgain += n_dot_g;
  const float factor = p.gain != nullptr ? rstd * p.gain[head] : rstd;
  const float along_x = p.normalise ? n_dot_g * p.inverse_dim * rstd : 0.f;
  for_each_element(
      p, token, lane,
      [&](uint32_t one, uint32_t two, float cos, float sin) {
        const RotatedPair g = rotated(dy, one, two, cos, sin);
        const float xa = tile::to_float(x[one]), xb = tile::to_float(x[two]);
        dx[one] = tile::from_float<T>(factor * (g.a - xa * along_x));
        dx[two] = tile::from_float<T>(factor * (g.b - xb * along_x));
      },
      [&](uint32_t c) {
        dx[c] = tile::from_float<T>(factor * (tile::to_float(dy[c]) - tile::to_float(x[c]) * along_x));
      });
}

template <class T>
__global__ void __launch_bounds__(kRopeThreads) backward_elements(const __grid_constant__ RopeParams p) {
  if (p.early) ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const Walk w = walk_of(p);
  float dgain = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < p.iterations; ++i)
    backward_element_head<T>(p, w.token + int64_t(i) * p.rows, i < w.count, w.head, w.lane, dgain);
  if (p.partial != nullptr) store_dgain(p, w, dgain);
}

}  // namespace ingot::cuda::rope_kernels
