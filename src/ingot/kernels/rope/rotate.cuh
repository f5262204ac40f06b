#pragma once
// The kernels of a rotation without a norm: y = R x, in vectors of 16 bytes.
#include <cstdint>

#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/kernels/rope/rope_config.h"
#include "ingot/kernels/rope/rope_params.cuh"
#include "ingot/kernels/rope/rotated_pairs.cuh"

namespace ingot::cuda::rope_kernels {

// y = R x. A group of threads has one head of a token, or for tensors larger than L2 two heads, half of all heads
// apart, which share a set of angles. For large tensors the table, or x with interleaved pairs, is loaded with the hint
// to stay in L2, so that written lines leave L2 first. With two heads a thread has 56 registers, and a multiprocessor
// nine blocks of 128 threads; eight blocks are 1.5 % slower and ten 5 %.
template <class T, bool kInterleaved, int kHeads>
__global__ void __launch_bounds__(kHeads == 2 ? kRopePairThreads : kRopeThreads, kHeads == 2 ? 9 : 5)
    rotate_heads(const __grid_constant__ RopeParams p) {
  constexpr int N = 16 / int(sizeof(T));
  start(p);
  ptx::wait_for_earlier_kernels();
  const uint32_t unit = blockIdx.x * blockDim.x + threadIdx.x;
  if (unit >= p.units) return;
  const tile::Division lane = tile::divide(unit, p.by_lanes), head = tile::divide(lane.quotient, p.by_heads);
  const Place at = place_of<N, kInterleaved>(p, lane.remainder);
  const int64_t token = p.first_token + head.quotient;
  // The position is loaded first, because the address of the angles depends on it.
  const int32_t position = at.rotates ? p.positions[token] : 0;
  const auto number = [&](int h) { return head.remainder + h * p.by_heads.value; };
  const auto has = [&](int h) { return kHeads == 1 || number(h) < p.heads; };

  Pair<T> x[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    constexpr Reads kReads = kHeads == 1 ? Reads::streaming : kInterleaved ? Reads::keeping : Reads::plain;
    if (has(h)) load_pair<T, kReads>(x[h], head_of<const T>(p.x, token, number(h)) + at.a, at);
  }
  Angles<N> angles;
  if (at.rotates) load_angles<N, kInterleaved, kHeads == 2>(angles, p, table_row(p, position), at);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    float a[N], b[N];
    to_floats<T>(x[h], a, b);
    if (at.rotates) rotate<kInterleaved>(angles, p.sign, a, b);
    if (has(h)) store_pair<T>(p, head_of<T>(p.y, token, number(h)) + at.a, at, a, b);
  }
}

// y = R x with one vector a thread, in the order of memory. The lanes of a head read and write whole lines of memory
// even where a part of the head has no rotation. Shuffles bring half-split pairs together, so y may be x.
template <class T, bool kInterleaved>
__global__ void __launch_bounds__(kRopeThreads) rotate_vectors(const __grid_constant__ RopeParams p) {
  constexpr int N = 16 / int(sizeof(T));
  start(p);
  ptx::wait_for_earlier_kernels();
  const uint32_t unit = blockIdx.x * blockDim.x + threadIdx.x;
  const tile::Division lane = tile::divide(unit, p.by_lanes), head = tile::divide(lane.quotient, p.by_heads);
  const int64_t token = p.first_token + head.quotient;
  const Place at = spread_place_of<N>(p, lane.remainder);
  const bool here = unit < p.units && at.a_ok && (at.rotates || !p.in_place);

  tile::Vec<T, N> x;
  if (here) tile::load_streaming(x, head_of<const T>(p.x, token, head.remainder) + at.a);
  float a[N];
  tile::to_float(x, a);
  if constexpr (kInterleaved) {
    if (here && at.rotates) {
      const int64_t row = table_row(p, p.positions[token]) + at.a / 2;
      tile::Vec<float, N / 2> cos, sin;
      tile::load(cos, p.cos + row);
      tile::load(sin, p.sin + row);
      float c[N / 2], s[N / 2];
      tile::to_float(cos, c);
      tile::to_float(sin, s);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) rotate_pair(a[2 * i], a[2 * i + 1], c[i], p.sign * s[i]);
    }
  } else {
    Angles<N> angles = {};
    if (here && at.rotates) load_angles<N, false, false, true>(angles, p, table_row(p, p.positions[token]), at);
    rotate_spread<T>(angles, p, at, x, partner_lane<N>(p, at), a);
  }
  if (here) tile::store(head_of<T>(p.y, token, head.remainder) + at.a, tile::from_float<T>(a), p.evict_first);
}

}  // namespace ingot::cuda::rope_kernels
