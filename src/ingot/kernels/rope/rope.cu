#include <algorithm>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/divide.cuh"
#include "ingot/gpu/tile/early_reads.cuh"
#include "ingot/gpu/tile/early_start.h"
#include "ingot/gpu/tile/keeping.cuh"
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/rope/rope.h"
#include "ingot/kernels/rope/rope_config.h"

namespace ingot::cuda {
namespace {

constexpr int64_t kMaxUnits = int64_t(1) << 30;  // threads of a launch; tile::divide needs less than 2^31
constexpr int kSumThreads = 128;

// (T, H, D) with any strides, in elements; the last stride is 1.
struct HeadRows {
  void* data = nullptr;
  int64_t token = 0, head = 0;
  int64_t step = 0;  // to the next token of a thread
};
template <class T> __device__ inline T* row_of(const HeadRows& r, int64_t token, uint32_t head) {
  return static_cast<T*>(r.data) + token * r.token + head * r.head;
}

struct Params {
  HeadRows x, dy, y;  // y or dx
  const int32_t* positions;
  const float *cos, *sin, *gain;
  float* partial;  // (heads, slices) sums for dgain, or null
  int64_t tokens, first_token, slice_tokens;
  uint32_t units, heads, head_dim, half, last_row, lanes, turning_lanes, passing_lanes;
  tile::Divisor by_lanes, by_heads, by_slots, by_chunks, by_rows;
  uint32_t slices, rows, iterations;
  tile::EarlyReads early_reads;  // of x, or of dy in the backward pass
  float sign, eps, inverse_dim;  // sign includes the direction of the pass
  bool normalise, interleaved, evict_first, early;
  bool in_place;  // y is x and there is no norm: dimensions without rotation stay where they are
};

// The row of the table with the angles of a position. Only the device knows the positions: a position outside the table
// takes the last row, so that no thread reads outside the table.
__device__ inline int64_t row_of_table(const Params& p, int32_t position) {
  const uint32_t row = uint32_t(position);
  return int64_t(row < p.last_row ? row : p.last_row) * p.half;
}

// Runs before a kernel computes the places of its threads, and waits for earlier kernels.
__device__ inline void start(const Params& p) {
  if (p.early) ptx::let_next_kernel_start();
  tile::ask_early<false>(p.early_reads, p.x.data);
}

__device__ inline float rstd_of(float sum_of_squares, const Params& p) {
  return __frsqrt_rn(sum_of_squares * p.inverse_dim + p.eps);
}

// --- two vectors of a head -------------------------------------------------------------------------------------------

// Where a lane's two vectors lie in the head. Lanes with rotation come first: vector a holds the first numbers of its
// pairs and b the second, or with interleaved pairs each vector holds whole pairs. Lanes whose dimensions pass through
// unchanged follow. Spread instead: vectors lie over the lanes as in memory, all of a before all of b, and the rotated
// dimensions are among the vectors a; shuffles bring the halves of a pair together.
struct Place {
  uint32_t a, b;
  bool a_ok, b_ok, turns;
};
template <int N, bool kInterleaved> __device__ inline Place place_of(const Params& p, uint32_t lane) {
  Place at;
  at.turns = lane < p.turning_lanes;
  if (at.turns) {
    at.a = lane * N;
    at.b = at.a + (kInterleaved ? p.turning_lanes * N : p.half);
    at.b_ok = at.b < 2 * p.half;
  } else {
    const uint32_t i = lane - p.turning_lanes;
    at.a = i < p.passing_lanes ? 2 * p.half + i * N : p.head_dim;
    at.b = at.a + p.passing_lanes * N;
    at.b_ok = at.b < p.head_dim;
  }
  at.a_ok = at.a < p.head_dim;
  return at;
}

template <int N> __device__ inline Place spread_place_of(const Params& p, uint32_t lane) {
  Place at;
  at.a = lane * N, at.b = at.a + p.lanes * N;
  at.turns = at.a < 2 * p.half;
  at.a_ok = at.a < p.head_dim, at.b_ok = at.b < p.head_dim;
  return at;
}

template <int N> struct Angles { float cos[N], sin[N]; };

// Loads the angles of a token, which start at `row`, for the pairs of a lane: through L1, because the lanes of all
// heads read the same row. kKeep: a hint to keep the table in L2 for the next call (half-split only: with interleaved
// pairs the hint costs too many registers).
template <int N, bool kInterleaved, bool kKeep, bool kSpread = false>
__device__ inline void load_angles(Angles<N>& r, const Params& p, int64_t row, const Place& at) {
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

// Each product and sum is rounded once, in every variant, so that a head has the same bits in all variants.
__device__ inline void turn(float& x1, float& x2, float cos, float sin) {
  const float y1 = fmaf(-x2, sin, x1 * cos);
  x2 = fmaf(x1, sin, x2 * cos);
  x1 = y1;
}
template <bool kInterleaved, int N>
__device__ inline void rotate(const Angles<N>& r, float sign, float (&a)[N], float (&b)[N]) {
  if constexpr (kInterleaved) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      turn(a[2 * i], a[2 * i + 1], r.cos[i], sign * r.sin[i]);
      turn(b[2 * i], b[2 * i + 1], r.cos[N / 2 + i], sign * r.sin[N / 2 + i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) turn(a[i], b[i], r.cos[i], sign * r.sin[i]);
  }
}

// Vector x of half-split pairs, whose partner numbers are in lane `from` of the warp.
template <class T, int N>
__device__ inline void rotate_spread(const Angles<N>& r, const Params& p, const Place& at, const tile::Vec<T, N>& x,
                                     uint32_t from, float (&a)[N]) {
  tile::Vec<T, N> other;
#pragma unroll
  for (int i = 0; i < 4; ++i) other.word[0][i] = __shfl_sync(~0u, x.word[0][i], int(from));
  if (!at.turns) return;
  float b[N];
  tile::to_float(other, b);
  const float sign = at.a < p.half ? -p.sign : p.sign;
#pragma unroll
  for (int i = 0; i < N; ++i) a[i] = fmaf(sign * r.sin[i], b[i], a[i] * r.cos[i]);
}
// The lane with the partner numbers of a lane's pairs; the lane itself where nothing rotates.
template <int N> __device__ inline uint32_t other_lane(const Params& p, const Place& at) {
  const uint32_t self = threadIdx.x % 32, away = p.half / N;
  return !at.turns ? self : at.a < p.half ? self + away : self - away;
}

template <class T> using Pair = tile::Vec<T, 16 / int(sizeof(T))>[2];

// How a vector is read: plainly, without L1 (which is left to the table), or with the hint to keep the vector in L2.
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
__device__ inline void store_pair(const Params& p, T* to, const Place& at, const float (&a)[N], const float (&b)[N]) {
  if (at.a_ok) tile::store(to, tile::from_float<T>(a), p.evict_first);
  if (at.b_ok) tile::store(to + (at.b - at.a), tile::from_float<T>(b), p.evict_first);
}
template <class T, int N> __device__ inline void to_floats(const Pair<T>& v, float (&a)[N], float (&b)[N]) {
  tile::to_float(v[0], a);
  tile::to_float(v[1], b);
}

// y = R x. A group of threads has one head of a token, or for tensors larger than L2 two heads, half of all heads
// apart, which share a set of angles. For large tensors the table, or x with interleaved pairs, is loaded with the hint
// to stay in L2, so that written lines leave L2 first. Two heads: 56 registers, nine blocks of 128 threads; eight are
// 1.5 % slower and ten 5 %.
template <class T, bool kInterleaved, int kHeads>
__global__ void __launch_bounds__(kHeads == 2 ? kRopePairThreads : kRopeThreads, kHeads == 2 ? 9 : 5)
    rotate_heads(const __grid_constant__ Params p) {
  constexpr int N = 16 / int(sizeof(T));
  start(p);
  ptx::wait_for_earlier_kernels();
  const uint32_t unit = blockIdx.x * blockDim.x + threadIdx.x;
  if (unit >= p.units) return;
  const tile::Division lane = tile::divide(unit, p.by_lanes), head = tile::divide(lane.quotient, p.by_heads);
  const Place at = place_of<N, kInterleaved>(p, lane.remainder);
  const int64_t token = p.first_token + head.quotient;
  const int32_t position = at.turns ? p.positions[token] : 0;  // first, because the address in the table depends on the
                                                               // position
  const auto number = [&](int h) { return head.remainder + h * p.by_heads.value; };
  const auto has = [&](int h) { return kHeads == 1 || number(h) < p.heads; };

  Pair<T> x[kHeads];
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    constexpr Reads kReads = kHeads == 1 ? Reads::streaming : kInterleaved ? Reads::keeping : Reads::plain;
    if (has(h)) load_pair<T, kReads>(x[h], row_of<const T>(p.x, token, number(h)) + at.a, at);
  }
  Angles<N> angles;
  if (at.turns) load_angles<N, kInterleaved, kHeads == 2>(angles, p, row_of_table(p, position), at);
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    float a[N], b[N];
    to_floats<T>(x[h], a, b);
    if (at.turns) rotate<kInterleaved>(angles, p.sign, a, b);
    if (has(h)) store_pair<T>(p, row_of<T>(p.y, token, number(h)) + at.a, at, a, b);
  }
}

// --- one vector a thread: a head lies over its lanes in memory order --------------------------------------------

// Whole lines of memory at a time, even if a part of the head has no rotation. Shuffles bring half-split pairs
// together, so that y may replace x.
template <class T, bool kInterleaved>
__global__ void __launch_bounds__(kRopeThreads) turn_rows(const __grid_constant__ Params p) {
  constexpr int N = 16 / int(sizeof(T));
  start(p);
  ptx::wait_for_earlier_kernels();
  const uint32_t unit = blockIdx.x * blockDim.x + threadIdx.x;
  const tile::Division lane = tile::divide(unit, p.by_lanes), head = tile::divide(lane.quotient, p.by_heads);
  const int64_t token = p.first_token + head.quotient;
  const Place at = spread_place_of<N>(p, lane.remainder);
  const bool here = unit < p.units && at.a_ok && (at.turns || !p.in_place);

  tile::Vec<T, N> x;
  if (here) tile::load_streaming(x, row_of<const T>(p.x, token, head.remainder) + at.a);
  float a[N];
  tile::to_float(x, a);
  if constexpr (kInterleaved) {
    if (here && at.turns) {
      const int64_t row = row_of_table(p, p.positions[token]) + at.a / 2;
      tile::Vec<float, N / 2> cos, sin;
      tile::load(cos, p.cos + row);
      tile::load(sin, p.sin + row);
      float c[N / 2], s[N / 2];
      tile::to_float(cos, c);
      tile::to_float(sin, s);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) turn(a[2 * i], a[2 * i + 1], c[i], p.sign * s[i]);
    }
  } else {
    Angles<N> angles = {};
    if (here && at.turns) load_angles<N, false, false, true>(angles, p, row_of_table(p, p.positions[token]), at);
    rotate_spread<T>(angles, p, at, x, other_lane<N>(p, at), a);
  }
  if (here) tile::store(row_of<T>(p.y, token, head.remainder) + at.a, tile::from_float<T>(a), p.evict_first);
}

// --- with a norm: a thread keeps its place in a head and walks from token to token -----------------------------------

// The head and the tokens of a thread: `count` of them, p.rows apart.
struct Walk {
  uint32_t group, lane, slice, head, count;
  int64_t token;
};
__device__ inline Walk walk_of(const Params& p) {
  const tile::Division lane = tile::divide(threadIdx.x, p.by_lanes), row = tile::divide(lane.quotient, p.by_slots);
  const tile::Division slice = tile::divide(blockIdx.x, p.by_chunks);
  Walk w{.group = lane.quotient, .lane = lane.remainder, .slice = slice.quotient};
  w.head = slice.remainder * p.by_slots.value + row.remainder;
  const int64_t begin = slice.quotient * p.slice_tokens, end = min(begin + p.slice_tokens, p.tokens);
  w.token = begin + row.quotient;
  const bool here = row.quotient < p.rows && w.head < p.heads && w.token < end;
  w.count = here ? uint32_t(tile::divide(uint32_t(end - w.token + p.rows - 1), p.by_rows).quotient) : 0;
  return w;
}

// A block's dgain: its threads' sums for each head in the order of their tokens.
__device__ inline void keep_dgain(const Params& p, const Walk& w, float dgain) {
  auto& found = tile::shared<float[kRopeThreads]>();
  const uint32_t slots = p.by_slots.value, first = blockIdx.x - w.slice * p.by_chunks.value;
  if (w.lane == 0) found[w.group] = dgain;
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < slots; i += blockDim.x) {
    const uint32_t head = first * slots + i;
    if (head >= p.heads) continue;
    float sum = 0;
    for (uint32_t r = 0; r < p.rows; ++r) sum += found[r * slots + i];
    p.partial[int64_t(head) * p.slices + w.slice] = sum;
  }
}

// y = gain * rstd * R x, for few tokens: a thread computes its part of a single head.
template <class T, bool kInterleaved>
__global__ void __launch_bounds__(kRopeThreads, 4) norm_heads(const __grid_constant__ Params p) {
  constexpr int N = 16 / int(sizeof(T));
  start(p);
  const uint32_t unit = blockIdx.x * blockDim.x + threadIdx.x;
  const bool ok = unit < p.units;
  const tile::Division lane = tile::divide(unit, p.by_lanes), head = tile::divide(lane.quotient, p.by_heads);
  const int64_t token = p.first_token + head.quotient;
  const Place at = place_of<N, kInterleaved>(p, lane.remainder);
  const T* const from = row_of<const T>(p.x, token, head.remainder) + at.a;
  ptx::wait_for_earlier_kernels();
  Pair<T> x;
  Angles<N> angles = {};
  float gain = 1;
  if (ok) {
    const int32_t position = at.turns ? p.positions[token] : 0;  // first, because the address in the table depends on
                                                                 // the position
    load_pair<T>(x, from, at);
    if (p.gain != nullptr) gain = p.gain[head.remainder];
    if (at.turns) load_angles<N, kInterleaved, true>(angles, p, row_of_table(p, position), at);
  }
  float a[N], b[N], sum[1] = {};
  to_floats<T>(x, a, b);
#pragma unroll
  for (int k = 0; k < N; ++k) sum[0] += a[k] * a[k] + b[k] * b[k];
  tile::warp_sum(sum, p.lanes);
  const float factor = p.normalise ? gain * rstd_of(sum[0], p) : gain;
  if (at.turns) rotate<kInterleaved>(angles, p.sign, a, b);
#pragma unroll
  for (int k = 0; k < N; ++k) a[k] *= factor, b[k] *= factor;
  if (ok) store_pair<T>(p, row_of<T>(p.y, token, head.remainder) + at.a, at, a, b);
}

// R is the rotation, n = x * rstd.   Forward: y = gain * R n.   Backward, with g = R^T dy:
//   dgain = n . g   dx = gain * rstd * (g - n * mean(n * g))
// The operands of the next token are loaded as soon as registers are free, so that loads are under way at all times;
// its position was loaded a token earlier, because the address in the table depends on the position.
template <class T, bool kInterleaved, bool kBackward, bool kSpread>
__global__ void __launch_bounds__(kRopeThreads, kBackward ? 3 : 4) walk_heads(const __grid_constant__ Params p) {
  constexpr int N = 16 / int(sizeof(T));
  start(p);
  const Walk w = walk_of(p);
  const Place at = kSpread ? spread_place_of<N>(p, w.lane) : place_of<N, kInterleaved>(p, w.lane);
  const uint32_t other = kSpread ? other_lane<N>(p, at) : 0;
  const T* x = row_of<const T>(p.x, w.token, w.head) + at.a;
  const T* dy = kBackward ? row_of<const T>(p.dy, w.token, w.head) + at.a : nullptr;
  T* y = row_of<T>(p.y, w.token, w.head) + at.a;
  ptx::wait_for_earlier_kernels();
  int64_t token = w.token;

  Pair<T> x_now, dy_now;
  Angles<N> angles;
  int32_t next_position = 0;
  if (w.count > 0) {
    if constexpr (kBackward) load_pair<T>(dy_now, dy, at);
    load_pair<T>(x_now, x, at);
    if (at.turns) load_angles<N, kInterleaved, true, kSpread>(angles, p, row_of_table(p, p.positions[token]), at);
    if (at.turns && w.count > 1) next_position = p.positions[token + p.rows];
  }
  const float gain = w.count > 0 && p.gain != nullptr ? p.gain[w.head] : 1.f;

  float dgain = 0;
  // Every thread of the block makes every turn, as warps sum over lanes of several heads at once.
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
    else if (at.turns)
      rotate<kInterleaved>(angles, p.sign, a, b);
    x += p.x.step, dy += p.dy.step, token += p.rows;
    if (more) {
      load_pair<T>(kBackward ? dy_now : x_now, kBackward ? dy : x, at);
      if (at.turns) load_angles<N, kInterleaved, true, kSpread>(angles, p, row_of_table(p, next_position), at);
      if (at.turns && i + 2 < w.count) next_position = p.positions[token + p.rows];
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
      const float both = sum[1] * rstd, along = p.normalise ? -factor * both * p.inverse_dim * rstd : 0.f;
      if (ok) dgain += both;
      float xa[N], xb[N];
      to_floats<T>(x_now, xa, xb);  // again, as 16 packed numbers wait in half the registers
#pragma unroll
      for (int k = 0; k < N; ++k) a[k] = factor * a[k] + xa[k] * along, b[k] = factor * b[k] + xb[k] * along;
      if (more) load_pair<T>(x_now, x, at);
    } else {
#pragma unroll
      for (int k = 0; k < N; ++k) a[k] *= factor, b[k] *= factor;
    }
    if (ok) store_pair<T>(p, y, at, a, b);
    y += p.y.step;
  }
  if (kBackward && p.partial != nullptr) keep_dgain(p, w, dgain);
}

// --- element by element: any alignment, any number of dimensions -----------------------------------------------------

// Calls use(element 1, element 2, cos, sin) for a lane's pairs, then pass(element) for its dimensions without rotation.
// A lane visits the same elements every time, so results may overwrite their operands.
template <class Turn, class Pass>
__device__ inline void for_each_element(const Params& p, int64_t token, uint32_t lane, Turn&& turns, Pass&& pass) {
  if (p.half > 0) {
    const int64_t row = row_of_table(p, p.positions[token]);
    for (uint32_t j = lane; j < p.half; j += p.lanes) {
      const uint32_t one = p.interleaved ? 2 * j : j, two = p.interleaved ? one + 1 : j + p.half;
      turns(one, two, p.cos[row + j], p.sin[row + j] * p.sign);
    }
  }
  for (uint32_t c = 2 * p.half + lane; c < p.head_dim; c += p.lanes) pass(c);
}

template <class T> __global__ void __launch_bounds__(kRopeThreads) rotate_elements(const __grid_constant__ Params p) {
  if (p.early) ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t unit = blockIdx.x * blockDim.x + threadIdx.x;
  const tile::Division lane = tile::divide(unit, p.by_lanes), head = tile::divide(lane.quotient, p.by_heads);
  const int64_t token = p.first_token + head.quotient;
  const bool ok = unit < p.units;
  const T* x = row_of<const T>(p.x, token, head.remainder);
  T* y = row_of<T>(p.y, token, head.remainder);

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
        float a = tile::to_float(x[one]), b = tile::to_float(x[two]);
        turn(a, b, cos, sin);
        y[one] = tile::from_float<T>(a * factor);
        y[two] = tile::from_float<T>(b * factor);
      },
      [&](uint32_t c) { y[c] = tile::from_float<T>(tile::to_float(x[c]) * factor); });
}

template <class T>
__device__ inline void backward_element_head(const Params& p, int64_t token, bool ok, uint32_t head, uint32_t lane,
                                             float& dgain) {
  const T *x = row_of<const T>(p.x, token, head), *dy = row_of<const T>(p.dy, token, head);
  T* dx = row_of<T>(p.y, token, head);
  float sum[2] = {};  // sums of x * x and of x * g
  if (ok)
    for_each_element(
        p, token, lane,
        [&](uint32_t one, uint32_t two, float cos, float sin) {
          float a = tile::to_float(dy[one]), b = tile::to_float(dy[two]);
          turn(a, b, cos, sin);
          const float xa = tile::to_float(x[one]), xb = tile::to_float(x[two]);
          sum[0] += xa * xa + xb * xb;
          sum[1] += xa * a + xb * b;
        },
        [&](uint32_t c) {
          const float value = tile::to_float(x[c]);
          sum[0] += value * value;
          sum[1] += value * tile::to_float(dy[c]);
        });
  tile::warp_sum(sum, p.lanes);
  if (!ok) return;
  const float rstd = p.normalise ? rstd_of(sum[0], p) : 1.f, both = sum[1] * rstd;
  dgain += both;
  const float factor = p.gain != nullptr ? rstd * p.gain[head] : rstd;
  const float along = p.normalise ? both * p.inverse_dim * rstd : 0.f;
  for_each_element(
      p, token, lane,
      [&](uint32_t one, uint32_t two, float cos, float sin) {
        float a = tile::to_float(dy[one]), b = tile::to_float(dy[two]);
        turn(a, b, cos, sin);
        const float xa = tile::to_float(x[one]), xb = tile::to_float(x[two]);
        dx[one] = tile::from_float<T>(factor * (a - xa * along));
        dx[two] = tile::from_float<T>(factor * (b - xb * along));
      },
      [&](uint32_t c) {
        dx[c] = tile::from_float<T>(factor * (tile::to_float(dy[c]) - tile::to_float(x[c]) * along));
      });
}

template <class T> __global__ void __launch_bounds__(kRopeThreads) backward_elements(const __grid_constant__ Params p) {
  if (p.early) ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const Walk w = walk_of(p);
  float dgain = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < p.iterations; ++i)
    backward_element_head<T>(p, w.token + int64_t(i) * p.rows, i < w.count, w.head, w.lane, dgain);
  if (p.partial != nullptr) keep_dgain(p, w, dgain);
}

// dgain += the slices of a head, in an order that depends only on the number of slices. Blocks are small, so that they
// fit beside the blocks whose sums are awaited; a thread issues all its loads at once.
__global__ void __launch_bounds__(kSumThreads, 16) add_slices(float* dgain, const float* partial, uint32_t slices) {
  constexpr int kLoads = kRopeMaxSlices / kSumThreads;
  auto& memory = tile::shared<tile::GroupSumMemory<1, kSumThreads>>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const float before = threadIdx.x == 0 ? dgain[blockIdx.x] : 0;
  const float* const mine = partial + int64_t(blockIdx.x) * slices + threadIdx.x;
  float slice[kLoads], sum[1] = {};
#pragma unroll
  for (int i = 0; i < kLoads; ++i) slice[i] = threadIdx.x + i * kSumThreads < slices ? mine[i * kSumThreads] : 0;
#pragma unroll
  for (int i = 0; i < kLoads; ++i) sum[0] += slice[i];
  tile::group_sum(sum, kSumThreads, memory);
  if (threadIdx.x == 0) dgain[blockIdx.x] = before + sum[0];
}

// --- host ------------------------------------------------------------------------------------------------------------

HeadRows rows_of(const Tensor& t) { return {t.data, t.stride[0], t.stride[1]}; }

bool heads_aligned(const Tensor& t) {
  if (!t) return true;
  if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
  for (int d = 0; d < 2; ++d)
    if (t.shape.dim[d] > 1 && t.stride[d] * size_of(t.dtype) % 16 != 0) return false;
  return true;
}
bool table_aligned(const Tensor& t) { return !t || reinterpret_cast<uintptr_t>(t.data) % 16 == 0; }

bool same_rows(const Tensor& a, const Tensor& b) {
  return a.data == b.data && (a.size(0) <= 1 || a.stride[0] == b.stride[0]) &&
         (a.size(1) <= 1 || a.stride[1] == b.stride[1]);
}

template <class Op> RopeShape shape_of(const Op& a, const Tensor& y, const Tensor& dy) {
  return {.tokens = a.x.size(0),
          .heads = a.x.size(1),
          .head_dim = a.x.cols(),
          .half = a.cos ? a.cos.cols() : 0,
          .dtype = a.x.dtype,
          .aligned = heads_aligned(a.x) && heads_aligned(y) && heads_aligned(dy) && table_aligned(a.cos) &&
                     table_aligned(a.sin),
          .interleaved = a.interleaved};
}
RopeShape shape_of(const Rope& a) {
  RopeShape s = shape_of(a, a.y, {});
  s.in_place = same_rows(a.x, a.y);
  return s;
}
RopeShape shape_of(const QkNormRope& a) {
  RopeShape s = shape_of(a, a.y, {});
  s.norm = true;
  return s;
}
RopeShape shape_of(const QkNormRopeBackward& a) {
  RopeShape s = shape_of(a, a.dx, a.dy);
  s.norm = s.backward = true;
  return s;
}

using Kernel = void (*)(Params);

template <class Use> auto with_cuda_float_type(const char* op, DType t, Use&& use) {
  switch (t) {
    case DType::f32: return use(float{});
    case DType::bf16: return use(bf16{});
    case DType::f16: return use(f16{});
    default: fail(ErrorCode::unsupported, op, ": found dtype ", t, " on a GPU, expected f32, bf16 or f16");
  }
}

template <class T> Kernel pick_kernel(const RopeShape& s, const RopeConfig& c) {
  if (!c.vectors) return s.backward ? backward_elements<T> : rotate_elements<T>;
  if (c.spread) return walk_heads<T, false, true, true>;
  if (s.backward) return s.interleaved ? walk_heads<T, true, true, false> : walk_heads<T, false, true, false>;
  if (!s.norm && c.per_lane == 1) return s.interleaved ? turn_rows<T, true> : turn_rows<T, false>;
  if (s.norm && c.once) return s.interleaved ? norm_heads<T, true> : norm_heads<T, false>;
  if (s.norm) return s.interleaved ? walk_heads<T, true, false, false> : walk_heads<T, false, false, false>;
  if (c.heads == 2) return s.interleaved ? rotate_heads<T, true, 2> : rotate_heads<T, false, 2>;
  return s.interleaved ? rotate_heads<T, true, 1> : rotate_heads<T, false, 1>;
}

void check_config(const char* op, const RopeConfig& c, const RopeShape& s) {
  const bool power = (c.lanes & (c.lanes - 1)) == 0 && c.lanes <= 32, rows = c.per_lane == 1;
  INGOT_CHECK(c.lanes >= 1 && c.lanes <= c.threads && ((c.vectors && !s.norm && !rows) || power), op, ": found ",
              c.lanes, " lanes, expected at most ", c.threads,
              ", and a power of two up to 32 where they exchange numbers");
  INGOT_CHECK(c.threads >= 32 && c.threads <= kRopeThreads && c.threads % 32 == 0, op, ": found ", c.threads,
              " threads, expected whole warps up to ", kRopeThreads);
  if (!c.vectors) return;
  const int64_t least = rows ? rope_row_vectors(s) : rope_head_lanes(s);
  INGOT_CHECK(rope_vector_lanes(s) > 0 && c.lanes >= least, op, ": found ", c.lanes, " lanes of vectors, expected ",
              least, " and operands that whole vectors reach");
  INGOT_CHECK(!c.spread || rope_may_spread(s, c.lanes), op, ": found vectors spread over ", c.lanes,
              " lanes, expected a backward pass with a norm, half-split pairs and all that turns in the first vectors");
  INGOT_CHECK(!rows || !s.norm, op, ": found one vector a lane, expected two with a norm");
  INGOT_CHECK(!c.once || (s.norm && !s.backward), op, ": found a head a thread, expected it forward with a norm only");
  INGOT_CHECK(c.heads == 1 || (c.heads == 2 && !rows && !s.norm && c.threads <= kRopePairThreads), op, ": found ",
              c.heads, " heads a lane in blocks of ", c.threads,
              ", expected 1, or 2 of two vectors each without a norm in up to ", kRopePairThreads, " threads");
}

// The parameters that all passes share.
template <class Op> Params params_of(const Op& a, const Tensor& y, const RopeShape& s, const RopeTuning& tuning) {
  Params p{};
  p.x = rows_of(a.x), p.y = rows_of(y);
  if (a.cos) {
    p.positions = static_cast<const int32_t*>(a.positions.data);
    p.last_row = uint32_t(a.cos.size(0) - 1);
    p.cos = static_cast<const float*>(a.cos.data), p.sin = static_cast<const float*>(a.sin.data);
  }
  const RopeConfig& c = tuning.config;
  p.tokens = s.tokens;
  p.heads = uint32_t(s.heads);
  p.inverse_dim = 1 / float(s.head_dim);
  p.head_dim = uint32_t(s.head_dim), p.half = uint32_t(s.half);
  p.lanes = uint32_t(c.lanes), p.turning_lanes = c.vectors ? uint32_t(rope_turning_lanes(s)) : 0;
  p.passing_lanes = c.vectors ? uint32_t(rope_head_lanes(s) - rope_turning_lanes(s)) : 0;
  p.by_lanes = tile::Divisor(p.lanes);
  p.by_heads = tile::Divisor(uint32_t(c.vectors ? ceil_divide(s.heads, c.heads) : s.heads));
  p.sign = float(a.sign), p.interleaved = a.interleaved, p.in_place = s.in_place && !s.norm;
  const bool large = a.x.numel() * size_of(a.x.dtype) > gpu::beyond_l2_bytes(gpu::current_limits());
  const bool first = large && c.heads == 1;
  p.evict_first = tuning.evict_first < 0 ? first : tuning.evict_first > 0;
  return p;
}
template <class Op> void add_norm(Params& p, const Op& a) {
  p.gain = a.gain ? static_cast<const float*>(a.gain.data) : nullptr;
  p.normalise = a.normalise, p.eps = float(a.eps);
}

void check_sizes(const char* op, const RopeShape& s) {
  constexpr int64_t kMost = kMaxUnits / kRopeThreads;
  if (s.heads * s.head_dim > kMost)
    fail(ErrorCode::unsupported, op, ": found ", s.heads, " heads of ", s.head_dim, ", expected at most ", kMost,
         " dimensions a token on a GPU");
}

// Used where all of x is read and x has no gaps.
tile::EarlyReads early_reads_of(const Params& p, const RopeShape& s, int64_t grid) {
  const bool whole = !p.in_place || 2 * s.half == s.head_dim;
  if (!whole || !s.aligned || p.x.head != s.head_dim || p.x.token != s.heads * s.head_dim) return {};
  return tile::early_reads(s.tokens * s.heads * s.head_dim * size_of(s.dtype), grid);
}

void launch_walk(const char* op, Kernel kernel, Params& p, const RopeShape& s, const RopeTuning& tuning, int device,
                 Stream stream) {
  const RopeSlices cut =
      pick_rope_slices(tuning.config, s.tokens, s.heads, p.partial != nullptr ? kRopeMaxSlices : kMaxUnits);
  p.slice_tokens = ceil_divide(s.tokens, cut.slices);
  p.slices = uint32_t(cut.slices), p.rows = uint32_t(cut.rows), p.iterations = uint32_t(cut.iterations);
  p.by_slots = tile::Divisor(uint32_t(cut.slots)), p.by_chunks = tile::Divisor(uint32_t(cut.chunks));
  p.by_rows = tile::Divisor(p.rows);
  for (HeadRows* r : {&p.x, &p.dy, &p.y}) r->step = r->token * cut.rows;
  const int64_t grid = cut.slices * cut.chunks;
  p.early = tuning.early != 0;
  if (!s.backward && cut.iterations == 1) p.early_reads = early_reads_of(p, s, grid);
  gpu::launch(op, kernel, {.grid = grid, .block = tuning.config.threads, .overlap = tuning.overlap, .device = device},
              stream, p);
}

void launch_forward(const char* op, Params& p, const RopeShape& s, const RopeTuning& tuning, int device,
                    Stream stream) {
  check_sizes(op, s);
  if (s.tokens == 0 || s.heads == 0 || s.head_dim == 0) return;
  check_config(op, tuning.config, s);
  const Kernel kernel =
      with_cuda_float_type(op, s.dtype, [&](auto t) { return pick_kernel<decltype(t)>(s, tuning.config); });
  if (s.norm && tuning.config.vectors && !tuning.config.once)
    return launch_walk(op, kernel, p, s, tuning, device, stream);
  const int64_t per_token = int64_t(p.by_heads.value) * p.lanes, most = kMaxUnits / per_token;
  for (; p.first_token < s.tokens; p.first_token += most) {
    const int64_t units = std::min(most, s.tokens - p.first_token) * per_token;
    p.units = uint32_t(units);
    const int64_t grid = ceil_divide(units, tuning.config.threads);
    const int64_t bytes = 2 * s.tokens * s.heads * s.head_dim * size_of(s.dtype) / grid;
    p.early = tuning.early < 0 ? tuning.config.once || tile::starts_next_early(bytes) : tuning.early > 0;
    if (p.first_token == 0) p.early_reads = early_reads_of(p, s, grid);
    gpu::launch(op, kernel, {.grid = grid, .block = tuning.config.threads, .overlap = tuning.overlap, .device = device},
                stream, p);
  }
}

void launch_rope(const char* op, const Rope& a, int direction, const RopeTuning& tuning, Stream stream) {
  const RopeShape s = shape_of(a);
  with_cuda_float_type(op, s.dtype, [](auto) { return 0; });
  Params p = params_of(a, a.y, s, tuning);
  p.sign *= float(direction);
  if (s.in_place && s.half == 0) return;
  launch_forward(op, p, s, tuning, a.x.device.index, stream);
}

}  // namespace

RopeTuning default_rope_tuning(const Rope& a) {
  return {.config = pick_rope_config(shape_of(a), gpu::current_limits())};
}
RopeTuning default_rope_tuning(const QkNormRope& a) {
  return {.config = pick_rope_config(shape_of(a), gpu::current_limits())};
}
RopeTuning default_rope_tuning(const QkNormRopeBackward& a) {
  return {.config = pick_rope_config(shape_of(a), gpu::current_limits())};
}

void rope_with(const Rope& a, const RopeTuning& tuning, Stream stream) { launch_rope("rope", a, +1, tuning, stream); }
void rope_backward_with(const Rope& a, const RopeTuning& tuning, Stream stream) {
  launch_rope("rope_backward", a, -1, tuning, stream);
}
void qk_norm_rope_with(const QkNormRope& a, const RopeTuning& tuning, Stream stream) {
  const RopeShape s = shape_of(a);
  with_cuda_float_type("qk_norm_rope", s.dtype, [](auto) { return 0; });
  Params p = params_of(a, a.y, s, tuning);
  add_norm(p, a);
  launch_forward("qk_norm_rope", p, s, tuning, a.x.device.index, stream);
}

void qk_norm_rope_backward_with(const QkNormRopeBackward& a, const RopeTuning& tuning, Stream stream) {
  const char* op = "qk_norm_rope_backward";
  const RopeShape s = shape_of(a);
  const RopeConfig& c = tuning.config;
  const Kernel kernel = with_cuda_float_type(op, s.dtype, [&](auto t) { return pick_kernel<decltype(t)>(s, c); });
  check_sizes(op, s);
  if (s.tokens == 0 || s.heads == 0 || s.head_dim == 0) return;
  check_config(op, c, s);
  Params p = params_of(a, a.dx, s, tuning);
  add_norm(p, a);
  p.dy = rows_of(a.dy);
  p.sign = -p.sign;
  p.partial = a.dgain ? static_cast<float*>(a.workspace.data) : nullptr;
  const int device = a.x.device.index;
  launch_walk(op, kernel, p, s, tuning, device, stream);
  if (a.dgain)
    gpu::launch(op, add_slices, {.grid = s.heads, .block = kSumThreads, .overlap = tuning.overlap, .device = device},
                stream, static_cast<float*>(a.dgain.data), static_cast<const float*>(p.partial), p.slices);
}

void rope(const Rope& a, Stream stream) { rope_with(a, default_rope_tuning(a), stream); }
void rope_backward(const Rope& a, Stream stream) { rope_backward_with(a, default_rope_tuning(a), stream); }
void qk_norm_rope(const QkNormRope& a, Stream stream) { qk_norm_rope_with(a, default_rope_tuning(a), stream); }
void qk_norm_rope_backward(const QkNormRopeBackward& a, Stream stream) {
  qk_norm_rope_backward_with(a, default_rope_tuning(a), stream);
}
int64_t qk_norm_rope_backward_workspace_bytes(int64_t tokens, int64_t heads) {
  return heads * std::min(tokens, kRopeMaxSlices) * int64_t(sizeof(float));
}

}  // namespace ingot::cuda
