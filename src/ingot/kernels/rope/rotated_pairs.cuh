#pragma once
// The two vectors of a head that a thread holds: their places in the head, their angles, loads, rotation and stores.
#include <cstdint>

#include "ingot/gpu/tile/keeping.cuh"
#include "ingot/kernels/rope/rope_params.cuh"

namespace ingot::cuda::rope_kernels {

// Where the two vectors of a lane lie in the head.
struct Place {
  uint32_t a, b;    // the first dimension of each vector
  bool a_ok, b_ok;  // whether the vector lies in the head
  bool rotates;
};
// Lanes with rotation come first. With half-split pairs vector a holds the first numbers of the lane's pairs and vector
// b the second; with interleaved pairs each vector holds whole pairs. Lanes whose dimensions pass through unchanged
// follow.
template <int N, bool kInterleaved> __device__ inline Place place_of(const RopeParams& p, uint32_t lane) {
  Place at;
  at.rotates = lane < p.rotating_lanes;
  if (at.rotates) {
    at.a = lane * N;
    at.b = at.a + (kInterleaved ? p.rotating_lanes * N : p.half);
    at.b_ok = at.b < 2 * p.half;
  } else {
    const uint32_t i = lane - p.rotating_lanes;
    at.a = i < p.passing_lanes ? 2 * p.half + i * N : p.head_dim;
    at.b = at.a + p.passing_lanes * N;
    at.b_ok = at.b < p.head_dim;
  }
  at.a_ok = at.a < p.head_dim;
  return at;
}

// Spread: the vectors of all lanes lie side by side as in memory, all vectors a before all vectors b. The rotated
// dimensions are among the vectors a, and shuffles bring the halves of a pair together.
template <int N> __device__ inline Place spread_place_of(const RopeParams& p, uint32_t lane) {
  Place at;
  at.a = lane * N, at.b = at.a + p.lanes * N;
  at.rotates = at.a < 2 * p.half;
  at.a_ok = at.a < p.head_dim, at.b_ok = at.b < p.head_dim;
  return at;
}

template <int N> struct Angles { float cos[N], sin[N]; };

// Loads the angles of a lane's pairs, of the token whose angles begin at `row` of the table. The loads go through L1,
// because the lanes of all heads read the same row. kKeep: with a hint to keep the table in L2 for the next call (only
// for half-split pairs; with interleaved pairs the hint costs too many registers).
template <int N, bool kInterleaved, bool kKeep, bool kSpread = false>
__device__ inline void load_angles(Angles<N>& r, const RopeParams& p, int64_t row, const Place& at) {
  if constexpr (kInterleaved) {
    constexpr int M = N / 2;  // pairs in a vector
    tile::Vec<float, M> cos[2], sin[2];
    tile::load(cos[0], p.cos + row + at.a / 2);
    tile::load(sin[0], p.sin + row + at.a / 2);
    if (at.b_ok) tile::load(cos[1], p.cos + row + at.b / 2);
    if (at.b_ok) tile::load(sin[1], p.sin + row + at.b / 2);
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      float c[M], s[M];
      tile::to_float(cos[v], c);
      tile::to_float(sin[v], s);
#pragma unroll
      for (int i = 0; i < M; ++i) r.cos[v * M + i] = c[i], r.sin[v * M + i] = s[i];
    }
  } else {
    tile::Vec<float, N> cos, sin;
    const float *c = p.cos + row + at.a, *s = p.sin + row + at.a;
    if (kSpread && at.a >= p.half) c -= p.half, s -= p.half;
    if constexpr (kKeep) {
#pragma unroll
      for (int i = 0; i < N / 4; ++i)
        ptx::load_keeping(c + 4 * i, cos.word[i]), ptx::load_keeping(s + 4 * i, sin.word[i]);
    } else {
      tile::load(cos, c);
      tile::load(sin, s);
    }
    tile::to_float(cos, r.cos);
    tile::to_float(sin, r.sin);
  }
}

// Rotates the pair (x1, x2). Every variant rounds each of these products and sums once, so that a head has the same
// bits in all variants.
__device__ inline void rotate_pair(float& x1, float& x2, float cos, float sin) {
  const float y1 = fmaf(-x2, sin, x1 * cos);
  x2 = fmaf(x1, sin, x2 * cos);
  x1 = y1;
}
template <bool kInterleaved, int N>
__device__ inline void rotate(const Angles<N>& r, float sign, float (&a)[N], float (&b)[N]) {
  if constexpr (kInterleaved) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      rotate_pair(a[2 * i], a[2 * i + 1], r.cos[i], sign * r.sin[i]);
      rotate_pair(b[2 * i], b[2 * i + 1], r.cos[N / 2 + i], sign * r.sin[N / 2 + i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) rotate_pair(a[i], b[i], r.cos[i], sign * r.sin[i]);
  }
}

// Rotates vector a of half-split pairs, given as loaded (x) and as floats; the other numbers of the pairs are in lane
// `from` of the warp.
template <class T, int N>
__device__ inline void rotate_spread(const Angles<N>& r, const RopeParams& p, const Place& at, const tile::Vec<T, N>& x,
                                     uint32_t from, float (&a)[N]) {
  tile::Vec<T, N> other;
#pragma unroll
  for (int i = 0; i < 4; ++i) other.word[0][i] = __shfl_sync(~0u, x.word[0][i], int(from));
  if (!at.rotates) return;
  float b[N];
  tile::to_float(other, b);
  const float sign = at.a < p.half ? -p.sign : p.sign;
#pragma unroll
  for (int i = 0; i < N; ++i) a[i] = fmaf(sign * r.sin[i], b[i], a[i] * r.cos[i]);
}
// The lane that holds the other numbers of a lane's pairs; the lane itself where nothing rotates.
template <int N> __device__ inline uint32_t partner_lane(const RopeParams& p, const Place& at) {
  const uint32_t self = threadIdx.x % 32, away = p.half / N;
  return !at.rotates ? self : at.a < p.half ? self + away : self - away;
}

template <class T> using Pair = tile::Vec<T, 16 / int(sizeof(T))>[2];

// How a vector is read: with no hint, without L1 (so that the table stays there), or with the hint to keep the vector
// in L2.
enum class Reads { plain, streaming, keeping };
template <class T, Reads kReads = Reads::plain>
__device__ inline void load_pair(Pair<T>& v, const T* a, const Place& at) {
  const auto load = [](auto& to, const T* from) {
    if constexpr (kReads == Reads::streaming)
      tile::load_streaming(to, from);
    else if constexpr (kReads == Reads::keeping)
      tile::load_keeping_l2(to, from);
    else
      tile::load(to, from);
  };
  if (at.a_ok) load(v[0], a);
  if (at.b_ok) load(v[1], a + (at.b - at.a));
}
template <class T, int N>
__device__ inline void store_pair(const RopeParams& p, T* to, const Place& at, const float (&a)[N],
                                  const float (&b)[N]) {
  if (at.a_ok) tile::store(to, tile::from_float<T>(a), p.evict_first);
  if (at.b_ok) tile::store(to + (at.b - at.a), tile::from_float<T>(b), p.evict_first);
}
template <class T, int N> __device__ inline void to_floats(const Pair<T>& v, float (&a)[N], float (&b)[N]) {
  tile::to_float(v[0], a);
  tile::to_float(v[1], b);
}

}  // namespace ingot::cuda::rope_kernels
