#pragma once
// The kernels between the products of a prompt: norms, rotation, and the assignment of tokens to experts.
#include <type_traits>

#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/kernels/moe/route.cuh"
#include "ingot/kernels/quant/weight_tile_product.cuh"
#include "ingot/megakernel/exchange.cuh"
#include "ingot/models/decode/phased/stages.cuh"
#include "ingot/models/decode/prompt/prompt.h"
#include "ingot/models/decode/small_batch/batched_sequences.h"

namespace ingot::decode::prompts {

constexpr int kThreads = 256, kWarps = kThreads / 32;

// The sum of all threads' numbers, in all threads, added in a fixed order.
__device__ __forceinline__ float block_sum(float v) {
  auto& of_warp = tile::shared<float[kWarps]>();
  v = weight_tiles::lanes_sum(v);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += of_warp[w];
  return sum;
}

// x (+)= the sum of the terms below; y = norm(x). One block per token.
struct Norm {
  float* x;
  bf16* y;
  int64_t stride;
  const float* weight;  // null: only x is computed
  uint32_t C;
  float eps;
  const bf16* table = nullptr;  // x = table[ids[t]]
  const int32_t* ids = nullptr;
  const float* down = nullptr;  // x += the weighted sum of k rows of `down`, in the order of choice
  const int32_t* place = nullptr;
  const float* weights = nullptr;
  uint32_t k = 0;
  bool first_part = false;         // ignores the old value of x
  const uint32_t* rows = nullptr;  // where set, block t reads row rows[t] of x and writes row t of y
};
constexpr uint32_t kMostChoices = 64;  // k
struct Choices {
  const float* row[kMostChoices];
  float weight[kMostChoices];
};
constexpr uint32_t kTogether = 4;  // rows of `down` requested together
// Numbers c to c + kWide - 1 of a token's terms: the old value of x, or the row of the table, and the first rows of
// `down`.
template <int kWide> struct Terms { alignas(16) float x[kWide], down[kTogether][kWide]; };
template <int kWide> using WideOf = std::conditional_t<kWide == 4, float4, float>;
template <int kWide> using NarrowOf = std::conditional_t<kWide == 4, uint2, uint16_t>;
template <int kWide>
__device__ __forceinline__ void request_rows(const Norm& p, const Choices& m, uint32_t first, uint32_t c,
                                             float (&down)[kTogether][kWide]) {
#pragma unroll
  for (uint32_t k = 0; k < kTogether; ++k) {
    WideOf<kWide> v = {};
    if (first + k < p.k) v = __ldcg(reinterpret_cast<const WideOf<kWide>*>(m.row[first + k] + c));
    *reinterpret_cast<WideOf<kWide>*>(down[k]) = v;
  }
}
template <int kWide>
__device__ __forceinline__ void request(const Norm& p, const Choices& m, int64_t t, uint32_t c, Terms<kWide>& terms) {
  if (p.table != nullptr) {
    const auto from = *reinterpret_cast<const NarrowOf<kWide>*>(p.table + int64_t(__ldcg(p.ids + t)) * p.C + c);
#pragma unroll
    for (int i = 0; i < kWide; ++i) terms.x[i] = float(reinterpret_cast<const bf16*>(&from)[i]);
  } else if (p.first_part) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) terms.x[i] = 0;
  } else {
    *reinterpret_cast<WideOf<kWide>*>(terms.x) = *reinterpret_cast<const WideOf<kWide>*>(p.x + t * p.stride + c);
  }
  request_rows<kWide>(p, m, 0, c, terms.down);
}
// Adds the terms and stores the sum.
template <int kWide>
__device__ __forceinline__ void add_up(const Norm& p, const Choices& m, int64_t t, uint32_t c, Terms<kWide>& terms,
                                       float (&v)[kWide]) {
#pragma unroll
  for (int i = 0; i < kWide; ++i) v[i] = terms.x[i];
  for (uint32_t first = 0; first < p.k; first += kTogether) {
    if (first > 0) request_rows<kWide>(p, m, first, c, terms.down);
#pragma unroll
    for (uint32_t k = 0; k < kTogether; ++k)
      if (first + k < p.k)
#pragma unroll
        for (int i = 0; i < kWide; ++i) v[i] += m.weight[first + k] * terms.down[k][i];
  }
  if (p.table != nullptr || p.k > 0)
    *reinterpret_cast<WideOf<kWide>*>(p.x + t * p.stride + c) = *reinterpret_cast<const WideOf<kWide>*>(v);
}
constexpr int kHeld = 3;  // vectors of a thread, the first ones, that stay in registers
// `ready` waits until the operands other than the weights can be read. The terms of kAtOnce vectors are requested
// together: in turn, each vector would wait for the memory again. With several, the weights are requested before
// ready().
template <int kWide, int kAtOnce, class Ready>
__device__ __forceinline__ void norm_row_of(const Norm& p, const Choices& m, int64_t t, Ready&& ready) {
  constexpr uint32_t kStep = kWide * kThreads;
  constexpr bool kEarly = kAtOnce > 1;
  alignas(16) float weight[kHeld][kWide] = {};
  const auto load_weight = [&](uint32_t c, float(&w)[kWide]) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) w[i] = __ldg(p.weight + c + i);
  };
  const auto load_weights = [&] {
#pragma unroll
    for (int h = 0; h < kHeld; ++h)
      if (const uint32_t c = kWide * threadIdx.x + h * kStep; c < p.C) load_weight(c, weight[h]);
  };
  if (kEarly && p.weight != nullptr) load_weights();
  ready();
  alignas(16) float held[kHeld][kWide] = {};
  float squares = 0;
  const auto add = [&](const float(&v)[kWide]) {
#pragma unroll
    for (int i = 0; i < kWide; ++i) squares += v[i] * v[i];
  };
#pragma unroll
  for (int first = 0; first < kHeld; first += kAtOnce) {
    Terms<kWide> terms[kAtOnce];
#pragma unroll
    for (int h = 0; h < kAtOnce; ++h)
      if (const uint32_t c = kWide * threadIdx.x + (first + h) * kStep; c < p.C) request<kWide>(p, m, t, c, terms[h]);
#pragma unroll
    for (int h = 0; h < kAtOnce; ++h)
      if (const uint32_t c = kWide * threadIdx.x + (first + h) * kStep; c < p.C)
        add_up<kWide>(p, m, t, c, terms[h], held[first + h]), add(held[first + h]);
  }
  for (uint32_t c = kWide * threadIdx.x + kHeld * kStep; c < p.C; c += kStep) {
    Terms<kWide> terms;
    alignas(16) float v[kWide];
    request<kWide>(p, m, t, c, terms), add_up<kWide>(p, m, t, c, terms, v), add(v);
  }
  if (p.weight == nullptr) return;
  const float rstd = 1 / sqrtf(block_sum(squares) / float(p.C) + p.eps);
  if (!kEarly) load_weights();
  const auto put = [&](uint32_t c, const float(&v)[kWide], const float(&w)[kWide]) {
    NarrowOf<kWide> y;
#pragma unroll
    for (int i = 0; i < kWide; ++i) reinterpret_cast<bf16*>(&y)[i] = bf16(v[i] * w[i] * rstd);
    *reinterpret_cast<NarrowOf<kWide>*>(p.y + t * p.stride + c) = y;
  };
#pragma unroll
  for (int h = 0; h < kHeld; ++h)
    if (const uint32_t c = kWide * threadIdx.x + h * kStep; c < p.C) put(c, held[h], weight[h]);
  for (uint32_t c = kWide * threadIdx.x + kHeld * kStep; c < p.C; c += kStep) {
    float v[kWide], w[kWide];
    load_weight(c, w);
#pragma unroll
    for (int i = 0; i < kWide; ++i) v[i] = p.x[t * p.stride + c + i];
    put(c, v, w);
  }
}
template <int kAtOnce, class Ready>
__device__ __forceinline__ void norm(const Norm& p, const Choices& m, int64_t t, Ready&& ready) {
  if (p.C % 4 == 0)
    norm_row_of<4, kAtOnce>(p, m, t, ready);
  else
    norm_row_of<1, kAtOnce>(p, m, t, ready);
}
__global__ void __launch_bounds__(kThreads) norm_kernel(Norm p) {
  auto& m = tile::shared<Choices>();
  const int64_t t = blockIdx.x;
  ptx::let_next_kernel_start();
  norm<kHeld>(p, m, t, [&] {
    ptx::wait_for_earlier_kernels();
    if (p.rows != nullptr) p.x += (int64_t(__ldcg(p.rows + t)) - t) * p.stride;
    if (threadIdx.x < p.k) {
      m.row[threadIdx.x] = p.down + int64_t(p.place[t * p.k + threadIdx.x]) * p.C;
      m.weight[threadIdx.x] = p.weights[t * p.k + threadIdx.x];
    }
    __syncthreads();
  });
}

// The preceding kernel has written this rank's part of the next exchange.
__global__ void say_ready_kernel(const __grid_constant__ megakernel::Exchange x) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  if (threadIdx.x != 0) return;
  const uint32_t epoch = ptx::load_relaxed(x.epoch) + 1;
  megakernel::say_ready(x, epoch);
  ptx::store_relaxed(x.epoch, epoch);
}
// x += the parts of this exchange, in the order of the ranks; y = norm(x).
struct RankNorm {
  Norm norm;
  Ranks ranks;
  const float* part[megakernel::kMostRanks];  // (T, stride)
  uint32_t from, what;                        // `from` has a bit for each rank that has a part
};
__global__ void __launch_bounds__(kThreads) rank_norm_kernel(const __grid_constant__ RankNorm p) {
  auto& m = tile::shared<Choices>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const megakernel::Exchange& x = p.ranks.exchange;
  const uint32_t r = threadIdx.x;
  if (r < x.ranks) {
    megakernel::wait_for_ready(x, ptx::load_relaxed(x.epoch), r, p.ranks.watch, p.what);
    const uint32_t before = uint32_t(__popc(p.from & ((1u << r) - 1)));
    if ((p.from >> r & 1) != 0) m.row[before] = p.part[r] + blockIdx.x * p.norm.stride, m.weight[before] = 1;
  }
  __syncthreads();
  if (r == 0) megakernel::pass_on_stop(x, p.ranks.watch);
  Norm all = p.norm;
  all.k = uint32_t(__popc(p.from));
  norm<1>(all, m, blockIdx.x, [] {});  // more would spill registers
}

// Rotates queries and keys, and stores keys and values in the cache. For sliding layers the keys and values are also
// stored in order, behind those of the window before. One block per token; the tokens of that window come first.
struct Rotate {
  const float *qkv, *cos, *sin;
  bf16 *q, *keys, *values;      // keys and values: the layer's cache
  bf16 *in_order, *v_in_order;  // null: the cache is in order
  uint32_t heads, kv_heads, dim, cache_dim, rows;
  uint32_t position, before;  // tokens of the window before this prompt
};
__device__ __forceinline__ int64_t cache_at(const Rotate& p, uint32_t position, uint32_t head) {
  return (int64_t(head) * p.rows + position % p.rows) * p.cache_dim;
}
__global__ void __launch_bounds__(kThreads) rotate_kernel(Rotate p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t width = p.kv_heads * p.dim;
  if (blockIdx.x < p.before) {
    const uint32_t position = p.position - p.before + blockIdx.x;
    for (uint32_t i = threadIdx.x; i < width; i += kThreads) {
      const int64_t from = cache_at(p, position, i / p.dim) + i % p.dim, to = int64_t(blockIdx.x) * width + i;
      p.in_order[to] = p.keys[from];
      p.v_in_order[to] = p.values[from];
    }
    return;
  }
  const uint32_t t = blockIdx.x - p.before, position = p.position + t, half = p.dim / 2;
  const float* const row = p.qkv + int64_t(t) * (p.heads + 2 * p.kv_heads) * p.dim;
  for (uint32_t i = threadIdx.x; i < (p.heads + p.kv_heads) * half; i += kThreads) {
    const uint32_t h = i / half, d = i % half, kv = h - p.heads;
    const float co = p.cos[int64_t(position) * half + d], si = p.sin[int64_t(position) * half + d];
    const float a = row[h * p.dim + d], b = row[h * p.dim + d + half];
    const bf16 low = bf16(a * co - b * si), high = bf16(b * co + a * si);
    if (h < p.heads) {
      bf16* const q = p.q + (int64_t(t) * p.heads + h) * p.dim + d;
      q[0] = low, q[half] = high;
      continue;
    }
    bf16* const key = p.keys + cache_at(p, position, kv) + d;
    key[0] = low, key[half] = high;
    if (p.in_order == nullptr) continue;
    bf16* const again = p.in_order + int64_t(p.before + t) * width + kv * p.dim + d;
    again[0] = low, again[half] = high;
  }
  for (uint32_t i = threadIdx.x; i < width; i += kThreads) {
    const bf16 v = bf16(row[(p.heads + p.kv_heads) * p.dim + i]);
    p.values[cache_at(p, position, i / p.dim) + i % p.dim] = v;
    if (p.v_in_order != nullptr) p.v_in_order[int64_t(p.before + t) * width + i] = v;
  }
}

// The arrays that attention reads on the device, and the bounds of products of one group.
struct Lengths {
  int32_t *whole, *ends, *halves, *half_rows;
  float* half_weights;
  int32_t *rows, *keys, *sliding;
  int32_t T, last;  // rows; rows whose logits are computed
  uint32_t parts;
  struct {
    int32_t rows, keys, sliding;
  } part[kMostParts];
};
__global__ void __launch_bounds__(kMostParts) lengths_kernel(const __grid_constant__ Lengths p) {
  ptx::wait_for_earlier_kernels();
  const uint32_t i = threadIdx.x;
  if (i == 0) p.whole[0] = p.ends[0] = 0, p.whole[1] = p.T, p.ends[1] = p.last;
  if (i < 3) p.halves[i] = int32_t(i) * p.T;
  if (int32_t(i) < p.T && i < kMostSequences) {
    p.half_rows[2 * i] = int32_t(i), p.half_rows[2 * i + 1] = p.T + int32_t(i);
    p.half_weights[2 * i] = p.half_weights[2 * i + 1] = 1;
  }
  if (i >= p.parts) return;
  p.rows[2 * i] = p.keys[2 * i] = p.sliding[2 * i] = 0;
  p.rows[2 * i + 1] = p.part[i].rows, p.keys[2 * i + 1] = p.part[i].keys, p.sliding[2 * i + 1] = p.part[i].sliding;
}

// logits = x w^T + bias, for few rows of bf16 weights. A block takes kRouted rows of weights and as many tokens, which
// gives more blocks than the tiles of a product would; its warps share K. The sums of the warps are added in their
// order. The last block of the tokens to finish makes their choice, where `arrived` is given.
constexpr uint32_t kRouted = 16;
constexpr int kRouteWarps = 16, kRouteThreads = 32 * kRouteWarps;
constexpr uint32_t kMostChosenHere = 256;  // experts
struct Choose {
  const float* logits;  // (T, E)
  uint32_t* chosen;
  float* weights;
  uint32_t T, E, k;
};
struct Route {
  const bf16* x;     // (T, stride), of which the first C of each row are used
  const uint8_t* w;  // row tiles of bf16 weight tiles
  const float* bias;
  float* logits;  // (T, E)
  int64_t stride, row_tile_bytes;
  uint32_t T, E, C, weight_tiles;
  uint32_t* arrived = nullptr;  // a counter for kRouted tokens each, zero between launches
  Choose choose = {};
};
struct RouteMemory {
  union {
    float parts[kRouteWarps][kRouted][kRouted + 1];
    float logits[kRouted][kMostChosenHere];
  };
  uint32_t last;
};
// This lane's words of up to kRouterTiles weight tiles of a row tile of the router, which are requested together: every
// kRouteWarps-th weight tile from `first` on. The words of weight tiles behind the last one are zeros.
constexpr uint32_t kRouterTiles = 3;
struct RouterWords {
  uint32_t a[kRouterTiles][4][4];
};
__device__ __forceinline__ void load_router(const Route& p, uint32_t first, uint32_t row_tile, RouterWords& words) {
  const uint4* const w = reinterpret_cast<const uint4*>(p.w + row_tile * p.row_tile_bytes) + threadIdx.x % 32;
#pragma unroll
  for (uint32_t i = 0; i < kRouterTiles; ++i)
#pragma unroll
    for (uint32_t s = 0; s < 4; ++s) {
      const uint32_t at = first + i * kRouteWarps;
      uint4 four = {};
      if (at < p.weight_tiles) four = __ldg(w + at * (weight_tiles::Form<WeightFormat::bf16>::kBytes / 16) + s * 32);
      uint32_t(&a)[4] = words.a[i][s];
      a[0] = four.x, a[1] = four.y, a[2] = four.z, a[3] = four.w;
    }
}
__device__ __forceinline__ void choose_here(const Route& p, uint32_t first, RouteMemory& m) {
  const uint32_t tokens = min(kRouted, p.T - first), warp = threadIdx.x / 32;
  static_assert(kRouteWarps >= int(kRouted), "each token has a warp");
  for (uint32_t i = threadIdx.x; i < tokens * p.E; i += kRouteThreads)
    m.logits[i / p.E][i % p.E] = __ldcg(p.logits + int64_t(first) * p.E + i);
  __syncthreads();
  const uint32_t k = p.choose.k, t = first + warp;
  if (warp < tokens) routing::choose(m.logits[warp], p.E, k, p.choose.chosen + t * k, p.choose.weights + t * k);
}
__global__ void __launch_bounds__(kRouteThreads) route_kernel(Route p) {
  auto& m = tile::shared<RouteMemory>();
  const uint32_t row_tiles = (p.E + kRouted - 1) / kRouted, row_tile = blockIdx.x % row_tiles;
  const uint32_t group = blockIdx.x / row_tiles, first = group * kRouted;
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, column = lane % 4 * 2;
  // The words of kRouterTiles weight tiles, and of the same columns of x, are requested together.
  RouterWords words;
  uint32_t b[kRouterTiles][4][2][2];
  load_router(p, warp, row_tile, words);  // no kernel writes the weights
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t* x[2];
  bool here[2];
#pragma unroll
  for (uint32_t block = 0; block < 2; ++block) {
    const uint32_t t = first + 8 * block + g;
    x[block] = reinterpret_cast<const uint32_t*>(p.x + t * p.stride), here[block] = t < p.T;
  }
  float sums[2][4] = {};
  for (uint32_t begin = warp; begin < p.weight_tiles; begin += kRouterTiles * kRouteWarps) {
    if (begin != warp) load_router(p, begin, row_tile, words);
#pragma unroll
    for (uint32_t i = 0; i < kRouterTiles; ++i)
#pragma unroll
      for (uint32_t s = 0; s < 4; ++s)
#pragma unroll
        for (uint32_t block = 0; block < 2; ++block)
#pragma unroll
          for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t c = (begin + i * kRouteWarps) * 64 + 16 * s + 8 * half + column;
            uint32_t two = 0;
            if (here[block] && c < p.C) two = x[block][c / 2];
            b[i][s][block][half] = c + 1 < p.C ? two : two & 0xffffu;
          }
#pragma unroll
    for (uint32_t i = 0; i < kRouterTiles; ++i)
#pragma unroll
      for (uint32_t s = 0; s < 4; ++s)
#pragma unroll
        for (uint32_t block = 0; block < 2; ++block)
          ptx::mma_m16n8k16(bf16{}, sums[block], words.a[i][s], b[i][s][block]);
  }
#pragma unroll
  for (uint32_t block = 0; block < 2; ++block)
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) m.parts[warp][g + i / 2 * 8][8 * block + column + i % 2] = sums[block][i];
  __syncthreads();
  if (threadIdx.x < kRouted * kRouted) {
    const uint32_t row = threadIdx.x % kRouted, token = threadIdx.x / kRouted, e = row_tile * kRouted + row,
                   t = first + token;
    float sum = 0;
#pragma unroll
    for (int w = 0; w < kRouteWarps; ++w) sum += m.parts[w][row][token];
    if (t < p.T && e < p.E) p.logits[int64_t(t) * p.E + e] = sum + p.bias[e];
  }
  if (p.arrived == nullptr) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    m.last = ptx::fetch_add_acq_rel(p.arrived + group, 1) == row_tiles - 1;
    if (m.last) ptx::store_relaxed(p.arrived + group, 0);
  }
  __syncthreads();
  if (m.last) choose_here(p, first, m);
}

// A warp for each token.
__global__ void __launch_bounds__(kThreads) choose_kernel(Choose p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t t = blockIdx.x * kWarps + threadIdx.x / 32;
  if (t < p.T) routing::choose(p.logits + int64_t(t) * p.E, p.E, p.k, p.chosen + t * p.k, p.weights + t * p.k);
}

// A block for each expert: its rows follow the rows of the experts before, in the order of tokens. offsets[e] is the
// first row of expert e, place[s] the row of choice s.
struct Places {
  const uint32_t* chosen;  // (S)
  int32_t *place, *offsets;
  uint32_t S, E;
  // Where `count` is set, only the choices of the first `count` tokens, k each, get a row of an expert. All further
  // choices get rows behind the rows of all experts.
  const uint32_t* count = nullptr;
  uint32_t k = 0;
};
__global__ void __launch_bounds__(kThreads) places_kernel(Places p) {
  auto& of_warp = tile::shared<uint32_t[kWarps]>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t e = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t S = p.count != nullptr ? min(p.S, __ldcg(p.count) * p.k) : p.S;
  if (e == 0)
    for (uint32_t s = S + threadIdx.x; s < p.S; s += kThreads) p.place[s] = int32_t(s);
  // Each warp has a range of choices, and counts the choices of this expert to find its first row.
  constexpr uint32_t kAhead = 4, kStep = 32 * kAhead;
  const uint32_t each = (S + kWarps * kStep - 1) / (kWarps * kStep) * kStep, begin = warp * each;
  const auto for_all = [&](auto&& use) {
    for (uint32_t first = begin + lane; first < begin + lane + each; first += kStep) {
      uint32_t chosen[kAhead];
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) chosen[i] = first + 32 * i < S ? p.chosen[first + 32 * i] : ~0u;
#pragma unroll
      for (uint32_t i = 0; i < kAhead; ++i) use(first + 32 * i, chosen[i], __ballot_sync(~0u, int(chosen[i] == e)));
    }
  };
  float less = 0;  // exact: far below 2^24
  uint32_t here = 0;
  for_all([&](uint32_t, uint32_t chosen, uint32_t all) {
    less += chosen < e ? 1.f : 0.f;
    here += uint32_t(__popc(all));
  });
  if (lane == 0) of_warp[warp] = here;
  const float total = block_sum(less);  // its barrier also publishes of_warp
  if (threadIdx.x == 0) p.offsets[e] = int32_t(total);
  if (e == 0 && threadIdx.x == 0) p.offsets[p.E] = int32_t(S);
  uint32_t at = uint32_t(total);
#pragma unroll
  for (uint32_t w = 0; w < kWarps; ++w) at += w < warp ? of_warp[w] : 0;
  for_all([&](uint32_t s, uint32_t chosen, uint32_t all) {
    if (chosen == e) p.place[s] = int32_t(at + uint32_t(__popc(all & ((1u << lane) - 1))));
    at += uint32_t(__popc(all));
  });
}

// With few choices place_and_gather_kernel() below does the work of places_kernel() and gather_kernel(). A block
// computes the rows of its own token's choices, and the offsets of some experts, by counting over all choices.
constexpr uint32_t kFewChoices = 1024;
// The number of choices whose row comes before the row of choice `s` of expert `e`: the choices of lower experts, and
// the earlier choices of the same expert. Called by all threads of a block, which all receive the result.
__device__ __forceinline__ uint32_t choices_before(const uint32_t* chosen, uint32_t S, uint32_t e, uint32_t s,
                                                   uint32_t (&of_warp)[kWarps]) {
  uint32_t before = 0;
  for (uint32_t i = threadIdx.x; i < S; i += kThreads) {
    const uint32_t c = chosen[i];
    before += c < e || (c == e && i < s) ? 1 : 0;
  }
  before = __reduce_add_sync(~0u, before);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = before;
  __syncthreads();
  uint32_t sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) sum += of_warp[w];
  __syncthreads();
  return sum;
}

// Copies each row of x to the rows of the token's choices. A block for each token.
struct Gather {
  const bf16* from;
  bf16* to;
  const int32_t* place;
  int64_t stride;  // of both, a multiple of 8
  uint32_t k;
};
__global__ void __launch_bounds__(kThreads) gather_kernel(Gather p) {
  auto& to = tile::shared<uint4* [kMostChoices]>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const int64_t t = blockIdx.x;
  if (threadIdx.x < p.k)
    to[threadIdx.x] = reinterpret_cast<uint4*>(p.to + int64_t(p.place[t * p.k + threadIdx.x]) * p.stride);
  __syncthreads();
  const uint4* const from = reinterpret_cast<const uint4*>(p.from + t * p.stride);
  for (uint32_t i = threadIdx.x; i < p.stride / 8; i += kThreads) {
    const uint4 v = from[i];
    for (uint32_t k = 0; k < p.k; ++k) to[k][i] = v;
  }
}

// x = scale table[ids[t]]. A block for each token.
struct ScaledRows {
  const bf16* table;
  const int32_t* ids;
  float* x;
  int64_t stride;
  uint32_t C;
  float scale;
};
__global__ void __launch_bounds__(kThreads) embed_rows_kernel(ScaledRows p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const bf16* const from = p.table + int64_t(__ldcg(p.ids + blockIdx.x)) * p.C;
  for (uint32_t c = threadIdx.x; c < p.C; c += kThreads) p.x[blockIdx.x * p.stride + c] = p.scale * float(from[c]);
}

// h = gate of gate and up, which alternate. A block for each row.
struct GateRows {
  const float* from;  // (rows, 2 I)
  bf16* to;
  int64_t stride;  // of `to`
  uint32_t I;
  Gate gate;
};
__global__ void __launch_bounds__(kThreads) gate_rows_kernel(GateRows p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const float2* const from = reinterpret_cast<const float2*>(p.from) + int64_t(blockIdx.x) * p.I;
  for (uint32_t i = threadIdx.x; i < p.I; i += kThreads) {
    const float2 both = __ldcg(from + i);
    p.to[blockIdx.x * p.stride + i] = bf16(gated(both.x, both.y, p.gate));
  }
}

struct PlaceAndGather {
  Places places;
  Gather gather;
};
__global__ void __launch_bounds__(kThreads) place_and_gather_kernel(PlaceAndGather p) {
  auto& to = tile::shared<uint4* [kMostChoices]>();
  auto& chosen = tile::shared<uint32_t[kFewChoices], 1>();
  auto& of_warp = tile::shared<uint32_t[kWarps], 2>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t t = blockIdx.x, k = p.gather.k, E = p.places.E;
  const uint32_t S = p.places.count != nullptr ? min(p.places.S, __ldcg(p.places.count) * k) : p.places.S;
  for (uint32_t i = threadIdx.x; i < S; i += kThreads) chosen[i] = __ldcg(p.places.chosen + i);
  __syncthreads();
  for (uint32_t j = 0; j < k; ++j) {
    const uint32_t s = t * k + j, at = s < S ? choices_before(chosen, S, chosen[s], s, of_warp) : s;
    if (threadIdx.x == 0) {
      p.places.place[s] = int32_t(at);
      to[j] = reinterpret_cast<uint4*>(p.gather.to + int64_t(at) * p.gather.stride);
    }
  }
  for (uint32_t e = t; e <= E; e += gridDim.x) {
    const uint32_t first = e < E ? choices_before(chosen, S, e, 0, of_warp) : S;
    if (threadIdx.x == 0) p.places.offsets[e] = int32_t(first);
  }
  __syncthreads();
  const uint4* const from = reinterpret_cast<const uint4*>(p.gather.from + int64_t(t) * p.gather.stride);
  for (uint32_t i = threadIdx.x; i < p.gather.stride / 8; i += kThreads) {
    const uint4 v = from[i];
    for (uint32_t j = 0; j < k; ++j) to[j][i] = v;
  }
}

}  // namespace ingot::decode::prompts
