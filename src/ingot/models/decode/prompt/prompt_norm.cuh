#pragma once
// The norms between the products of a prompt. A norm also computes its input, the residual stream x: the embedding, or
// x plus the results of the experts, or x plus the parts of several GPUs.
#include <type_traits>

#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/megakernel/exchange.cuh"
#include "ingot/models/decode/phased/stages.cuh"
#include "ingot/models/decode/prompt/prompt_block.cuh"

namespace ingot::decode::prompts {

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
// The rows of `down` that a token adds, in shared memory.
struct Choices {
  const float* row[kMostChoices];
  float weight[kMostChoices];
};
constexpr uint32_t kTogether = 4;  // rows of `down` requested together
// Numbers c to c + kWide - 1 of the terms of a token's x: its old value or the row of the table, and the first rows of
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
// together; if they were requested one vector after another, each vector would wait for the memory. If kAtOnce is more
// than 1, the weights are requested before ready().
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

}  // namespace ingot::decode::prompts
