#pragma once
// The rows of a prompt's tokens in the order of the experts: the place of each choice of an expert, and copies of the
// rows there. Each expert then multiplies a contiguous run of rows.
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/models/decode/phased/stages.cuh"
#include "ingot/models/decode/prompt/prompt_block.cuh"

namespace ingot::decode::prompts {

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

// Copies each row of x to the rows of the token's choices. A block for each token.
struct Gather {
  const bf16* from;
  bf16* to;
  const int32_t* place;
  int64_t stride;  // of both, a multiple of 8
  uint32_t k;
};
__device__ __forceinline__ void copy_row(const Gather& p, int64_t t, uint4* const (&to)[kMostChoices]) {
  const uint4* const from = reinterpret_cast<const uint4*>(p.from + t * p.stride);
  for (uint32_t i = threadIdx.x; i < p.stride / 8; i += kThreads) {
    const uint4 v = from[i];
    for (uint32_t k = 0; k < p.k; ++k) to[k][i] = v;
  }
}
__global__ void __launch_bounds__(kThreads) gather_kernel(Gather p) {
  auto& to = tile::shared<uint4* [kMostChoices]>();
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const int64_t t = blockIdx.x;
  if (threadIdx.x < p.k)
    to[threadIdx.x] = reinterpret_cast<uint4*>(p.to + int64_t(p.place[t * p.k + threadIdx.x]) * p.stride);
  __syncthreads();
  copy_row(p, t, to);
}

// With few choices place_and_gather_kernel() does the work of places_kernel() and gather_kernel(). A block
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
  copy_row(p.gather, t, to);
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

}  // namespace ingot::decode::prompts
