#pragma once
// The kernels of the norm, rotation and gain of heads, forward and backward, in vectors of 16 bytes.
#include <cstdint>

#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/kernels/rope/rope_config.h"
#include "ingot/kernels/rope/rope_params.cuh"
#include "ingot/kernels/rope/rotated_pairs.cuh"
#include "ingot/kernels/rope/token_walk.cuh"

namespace ingot::cuda::rope_kernels {

// y = gain * rstd * R x, for few tokens: a thread computes its part of a single head.
template <class T, bool kInterleaved>
__global__ void __launch_bounds__(kRopeThreads, 4) norm_heads(const __grid_constant__ RopeParams p) {
  constexpr int N = 16 / int(sizeof(T));
  start(p);
  const uint32_t unit = blockIdx.x * blockDim.x + threadIdx.x;
  const bool ok = unit < p.units;
  const tile::Division lane = tile::divide(unit, p.by_lanes), head = tile::divide(lane.quotient, p.by_heads);
  const int64_t token = p.first_token + head.quotient;
  const Place at = place_of<N, kInterleaved>(p, lane.remainder);
  const T* const from = head_of<const T>(p.x, token, head.remainder) + at.a;
  ptx::wait_for_earlier_kernels();
  Pair<T> x;
  Angles<N> angles = {};
  float gain = 1;
  if (ok) {
    // The position is loaded first, because the address of the angles depends on it.
    const int32_t position = at.rotates ? p.positions[token] : 0;
    load_pair<T>(x, from, at);
    if (p.gain != nullptr) gain = p.gain[head.remainder];
    if (at.rotates) load_angles<N, kInterleaved, true>(angles, p, table_row(p, position), at);
  }
  float a[N], b[N], sum[1] = {};
  to_floats<T>(x, a, b);
#pragma unroll
  for (int k = 0; k < N; ++k) sum[0] += a[k] * a[k] + b[k] * b[k];
  tile::warp_sum(sum, p.lanes);
  const float factor = p.normalise ? gain * rstd_of(sum[0], p) : gain;
  if (at.rotates) rotate<kInterleaved>(angles, p.sign, a, b);
#pragma unroll
  for (int k = 0; k < N; ++k) a[k] *= factor, b[k] *= factor;
  if (ok) store_pair<T>(p, head_of<T>(p.y, token, head.remainder) + at.a, at, a, b);
}

// R is the rotation, n = x * rstd.   Forward: y = gain * R n.   Backward, with g = R^T dy:
//   dgain = n . g   dx = gain * rstd * (g - n * mean(n * g))
// A thread walks from token to token. The operands of the next token are loaded as soon as registers are free, so that
// loads are in flight at all times. The position of that token was loaded one token earlier, because the address of the
// angles depends on the position.
template <class T, bool kInterleaved, bool kBackward, bool kSpread>
__global__ void __launch_bounds__(kRopeThreads, kBackward ? 3 : 4) walk_heads(const __grid_constant__ RopeParams p) {
  constexpr int N = 16 / int(sizeof(T));
  start(p);
  const Walk w = walk_of(p);
  const Place at = kSpread ? spread_place_of<N>(p, w.lane) : place_of<N, kInterleaved>(p, w.lane);
  const uint32_t other = kSpread ? partner_lane<N>(p, at) : 0;
  const T* x = head_of<const T>(p.x, w.token, w.head) + at.a;
  const T* dy = kBackward ? head_of<const T>(p.dy, w.token, w.head) + at.a : nullptr;
  T* y = head_of<T>(p.y, w.token, w.head) + at.a;
  ptx::wait_for_earlier_kernels();
  int64_t token = w.token;

  Pair<T> x_now, dy_now;
  Angles<N> angles;
  int32_t next_position = 0;
  if (w.count > 0) {
    if constexpr (kBackward) load_pair<T>(dy_now, dy, at);
    load_pair<T>(x_now, x, at);
    if (at.rotates) load_angles<N, kInterleaved, true, kSpread>(angles, p, table_row(p, p.positions[token]), at);
    if (at.rotates && w.count > 1) next_position = p.positions[token + p.rows];
  }
  const float gain = w.count > 0 && p.gain != nullptr ? p.gain[w.head] : 1.f;

  float dgain = 0;
  // Threads without a token take part in every iteration, because a warp sums over the lanes of several heads at once.
#pragma unroll 1
  for (uint32_t i = 0; i < p.iterations; ++i) {
    const bool ok = i < w.count, more = i + 1 < w.count;
    float a[N], b[N], sum[kBackward ? 2 : 1] = {};  // sums of x * x and of x * g
    to_floats<T>(kBackward ? dy_now : x_now, a, b);
    if constexpr (!kBackward)
#pragma unroll
      for (int k = 0; k < N; ++k) sum[0] += a[k] * a[k] + b[k] * b[k];
    if constexpr (kSpread)
      rotate_spread<T>(angles, p, at, (kBackward ? dy_now : x_now)[0], other, a);
    else if (at.rotates)
      rotate<kInterleaved>(angles, p.sign, a, b);
    x += p.x.step, dy += p.dy.step, token += p.rows;
    if (more) {
      load_pair<T>(kBackward ? dy_now : x_now, kBackward ? dy : x, at);
      if (at.rotates) load_angles<N, kInterleaved, true, kSpread>(angles, p, table_row(p, next_position), at);
      if (at.rotates && i + 2 < w.count) next_position = p.positions[token + p.rows];
    }
    if constexpr (kBackward) {
      float xa[N], xb[N];
      to_floats<T>(x_now, xa, xb);
#pragma unroll
      for (int k = 0; k < N; ++k) {
        sum[0] += xa[k] * xa[k] + xb[k] * xb[k];
        sum[1] += xa[k] * a[k] + xb[k] * b[k];
      }
    }
    tile::warp_sum(sum, p.lanes);
    const float rstd = p.normalise ? rstd_of(sum[0], p) : 1.f, factor = gain * rstd;
    if constexpr (kBackward) {
      const float n_dot_g = sum[1] * rstd, along_x = p.normalise ? -factor * n_dot_g * p.inverse_dim * rstd : 0.f;
      if (ok) dgain += n_dot_g;
      float xa[N], xb[N];
      to_floats<T>(x_now, xa, xb);  // converted again, because x in 16 bits takes half the registers until here
#pragma unroll
      for (int k = 0; k < N; ++k) a[k] = factor * a[k] + xa[k] * along_x, b[k] = factor * b[k] + xb[k] * along_x;
      if (more) load_pair<T>(x_now, x, at);
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) a[k] *= factor, b[k] *= factor;
    }
    if (ok) store_pair<T>(p, y, at, a, b);
    y += p.y.step;
  }
  if (kBackward && p.partial != nullptr) store_dgain(p, w, dgain);
}

}  // namespace ingot::cuda::rope_kernels
