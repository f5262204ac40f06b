#pragma once
// The router of a small batch: computes the activation vectors of gate and up, the experts of each token, and the lists
// of all tokens.
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/kernels/moe/route.cuh"
#include "ingot/models/decode/small_batch/small_batch_sums.cuh"

namespace ingot::decode::small_batch {

// Writes activation vectors of the next product from the data that route() has in shared memory. The blocks of a row
// tile share the tokens; half of the threads of a block write.
__device__ __forceinline__ void put_normed(const Router& p, const Normed& to, const char* vectors, uint32_t row_tile,
                                           uint32_t split) {
  constexpr uint32_t kFirst = weight_tiles::kThreads / 2;
  const uint32_t first = split * kSplitWeightTiles * 64,
                 end = min(first + kSplitWeightTiles * 64, p.w.weight_tiles * 64);
  if (threadIdx.x < kFirst) return;
  for (uint32_t t = row_tile; t < p.T; t += p.w.row_tiles)
    for (uint32_t c = first + 4 * (threadIdx.x - kFirst); c < end; c += 4 * kFirst) {
      float v[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i)
        v[i] = float(*reinterpret_cast<const bf16*>(vectors + t * weight_tiles::vector_stride(p.w.cols) +
                                                    2 * weight_tiles::place(false, c + i)));
      put_normed(to, t, p.w.cols, c, v);
    }
}

// One warp handles one token: it adds the parts of the token's logits, which are all requested together, and chooses
// the experts.
__device__ __forceinline__ void choose_experts(const Router& p, const ChoiceMemory& m) {
  const uint32_t E = p.w.rows, lane = threadIdx.x % 32;
  constexpr uint32_t kHeld = 6, kItems = 4;
#pragma unroll 1
  for (uint32_t t = threadIdx.x / 32; t < p.T; t += blockDim.x / 32) {
    float squares = 0;
    for (uint32_t s = lane; s < p.splits; s += 32) squares += __ldcg(p.squares + s * kMostTokens + t);
    float* const logits = m.logits + t * E;
#pragma unroll 1
    for (uint32_t of_all = 0; of_all < E; of_all += 32 * kItems) {
      const uint32_t begin = of_all + lane;
      float sum[kItems] = {}, bias[kItems];
#pragma unroll
      for (uint32_t u = 0; u < kItems; ++u) bias[u] = begin + 32 * u < E ? p.bias[begin + 32 * u] : 0;
#pragma unroll 1
      for (uint32_t first = 0; first < p.splits; first += kHeld) {
        float part[kHeld][kItems];
#pragma unroll
        for (uint32_t s = 0; s < kHeld; ++s)
#pragma unroll
          for (uint32_t u = 0; u < kItems; ++u)
            part[s][u] = first + s < p.splits && begin + 32 * u < E
                             ? __ldcg(p.part + ((first + s) * kMostTokens + t) * E + begin + 32 * u)
                             : 0;
#pragma unroll
        for (uint32_t s = 0; s < kHeld; ++s)
#pragma unroll
          for (uint32_t u = 0; u < kItems; ++u) sum[u] += part[s][u];
      }
      if (of_all == 0) squares = weight_tiles::lanes_sum(squares);
#pragma unroll
      for (uint32_t u = 0; u < kItems; ++u)
        if (begin + 32 * u < E) logits[begin + 32 * u] = sum[u] / sqrtf(squares / float(p.w.cols) + p.eps) + bias[u];
    }
    __syncwarp();
    routing::choose(logits, E, p.k, m.chosen + t * p.k, m.weights + t * p.k);
  }
  __syncthreads();
}

// Writes the lists of all tokens, by all threads of a block, in three steps with barriers between them: the first step
// before any choice is known, the second when the choices are known, the third for data that is needed only when a
// product ends. `to` is the block's own lists, as copy_lists() places them; with kCols = kTokens also the lists in
// global memory.
template <int kCols>
__device__ __forceinline__ void begin_lists(const ChoiceMemory& m, uint32_t E, uint32_t most, const routing::Copy& to) {
#pragma unroll 1
  for (uint32_t e = threadIdx.x; e < E; e += blockDim.x) m.first[e] = 0;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < most * kCols; i += blockDim.x) to.weight[i] = 0, to.row[i] = -1;
}
// Lists the chosen experts in the order of their numbers. Ends with a barrier and returns the number of expert slots.
__device__ __forceinline__ uint32_t list_experts(const ChoiceMemory& m, uint32_t T, uint32_t E, uint32_t k,
                                                 uint32_t& expert_slots, const routing::Copy& to) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < T * k; i += blockDim.x) m.first[m.chosen[i]] = 1;
  __syncthreads();
  const auto chosen_of = [&](uint32_t chunk) {
    const uint32_t e = 32 * chunk + lane;
    return __ballot_sync(~0u, int(e < E && m.first[e] != 0));
  };
  uint32_t before = 0, next = 0;
#pragma unroll 1
  for (uint32_t chunk = threadIdx.x / 32; 32 * chunk < E; chunk += blockDim.x / 32) {  // one warp handles 32 experts
#pragma unroll 1
    for (; next < chunk; ++next) before += uint32_t(__popc(chosen_of(next)));
    const uint32_t e = 32 * chunk + lane, all = chosen_of(chunk);
    if ((all >> lane & 1) != 0) {
      const uint32_t expert_slot = before + uint32_t(__popc(all & ((1u << lane) - 1)));
      to.expert[expert_slot] = int32_t(e);
      m.first[e] = 1 + expert_slot;  // not zero, because other warps may still test this word for zero
    }
    if (32 * chunk + 32 >= E && lane == 0) expert_slots = before + uint32_t(__popc(all));
  }
  __syncthreads();
  return expert_slots;
}
template <int kCols>
__device__ __forceinline__ void list_tokens(const ChoiceMemory& m, uint32_t T, uint32_t k, const routing::Copy& to) {
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < T * k; i += blockDim.x) {
    const uint32_t at = (m.first[m.chosen[i]] - 1) * kCols + i / k;
    to.weight[at] = m.weights[i], to.row[at] = int32_t(i);
  }
}

// --- code of the blocks of gate and up, with `kThreads` threads each

constexpr uint32_t kRouterStride = weight_tiles::vector_stride(kSplitWeightTiles * 64);
template <int kCols> struct RouterRoom {
  char vectors[kCols][kRouterStride];
  float sums[weight_tiles::kWarps][16][kCols], squares[weight_tiles::kWarps][kCols];
};
INGOT_HD inline int64_t choice_bytes(uint32_t T, uint32_t E, uint32_t k) {
  return (ChoiceMemory::bytes(T, E, k) + 15) / 16 * 16;
}
template <int kCols> INGOT_HD inline int64_t router_bytes(uint32_t T, uint32_t E, uint32_t k) {
  return choice_bytes(T, E, k) + int64_t(sizeof(RouterRoom<kCols>));
}

// The same as route() with more warps: parts of the logits are computed in parallel, with the same bits, and each
// thread also writes its channels of the activation vectors of gate and up. Waits for earlier kernels.
template <int kCols, uint32_t kThreads>
__device__ __forceinline__ void route_wide(const Router& p, const Normed& normed, At at, RouterRoom<kCols>& m) {
  constexpr uint32_t kGroups = kThreads / kSplitThreads, kHeld = 2;  // kHeld: tokens requested together
  static_assert(weight_tiles::kWarps == kSplitWeightTiles && kSplitWarps <= weight_tiles::kWarps,
                "a weight tile a warp");
  const uint32_t group = threadIdx.x / kSplitThreads, thread = threadIdx.x % kSplitThreads, warp = threadIdx.x / 32;
  const auto ask = [&](uint32_t unit, weight_tiles::Stored<WeightFormat::bf16>& held) {
    const uint32_t row_tile = unit / p.splits, weight_tile = unit % p.splits * kSplitWeightTiles + warp;
    if (row_tile >= p.w.row_tiles || warp >= kSplitWeightTiles || weight_tile >= p.w.weight_tiles) return;
    weight_tiles::load<WeightFormat::bf16>(
        held, p.w.data + row_tile * p.w.row_tile_bytes + weight_tile * weight_tiles::Form<WeightFormat::bf16>::kBytes,
        threadIdx.x % 32);
  };
  weight_tiles::Stored<WeightFormat::bf16> held{};
  ask(at.block, held);
  ptx::wait_for_earlier_kernels();
#pragma unroll 1
  for (uint32_t unit = at.block; unit < p.w.row_tiles * p.splits; unit += at.blocks) {
    const uint32_t row_tile = unit / p.splits, split = unit % p.splits, C = p.w.cols,
                   c = 4 * (split * kSplitThreads + thread);
    float weight[4];
    weight_tiles::load4(p.weight, c, C, weight);
#pragma unroll 1
    for (uint32_t first = group; first < p.T; first += kHeld * kGroups) {
      float v[kHeld][4] = {};
#pragma unroll
      for (uint32_t u = 0; u < kHeld; ++u)
        if (const uint32_t t = first + u * kGroups; t < p.T) weight_tiles::load4(p.x + t * p.x_stride, c, C, v[u]);
#pragma unroll
      for (uint32_t u = 0; u < kHeld; ++u) {
        const uint32_t t = first + u * kGroups;
        if (t >= p.T) continue;
        float sum = 0;
#pragma unroll
        for (uint32_t i = 0; i < 4; ++i) sum += v[u][i] * v[u][i], v[u][i] *= weight[i];
        weight_tiles::put4<WeightFormat::bf16>(m.vectors[t], 4 * thread, v[u]);
        if (t % p.w.row_tiles == row_tile && c < weight_tiles::padded(C)) {
          float rounded[4];  // the input of the router
#pragma unroll
          for (uint32_t i = 0; i < 4; ++i) rounded[i] = float(bf16(v[u][i]));
          put_normed(normed, t, C, c, rounded);
        }
        sum = weight_tiles::lanes_sum(sum);
        if (thread % 32 == 0) m.squares[thread / 32][t] = sum;
      }
    }
    __syncthreads();
    if (warp < kSplitWeightTiles) {
      const char* mine[kBlocks8<kCols>];
      weight_tiles::lane_vectors(m.vectors[0], kRouterStride, p.T, mine);
      float sum[kBlocks8<kCols>][4] = {};
      if (split * kSplitWeightTiles + warp < p.w.weight_tiles)
        weight_tiles::multiply<WeightFormat::bf16>(held, mine, warp * weight_tiles::kVectorTileBytes, sum);
      weight_tiles::put_sums<kCols>(m.sums, sum);
    }
    ask(unit + at.blocks, held);
    __syncthreads();
    const uint32_t row = threadIdx.x / kCols, j = threadIdx.x % kCols, e = 16 * row_tile + row;
    if (threadIdx.x < 16 * kCols && j < p.T && e < p.w.rows)
      p.part[(split * kMostTokens + j) * p.w.rows + e] = weight_tiles::total<kCols>(m.sums, row, j);
    if (row_tile == 0 && threadIdx.x < p.T) {
      float sum = 0;
#pragma unroll
      for (uint32_t w = 0; w < kSplitWarps; ++w) sum += m.squares[w][threadIdx.x];
      p.squares[split * kMostTokens + threadIdx.x] = sum;
    }
  }
}

// The memory into which copy_lists() places the lists.
template <int kCols> __device__ __forceinline__ routing::Copy copy_at(char* memory, uint32_t most) {
  routing::Copy c;
  c.expert = reinterpret_cast<int32_t*>(memory);
  c.row = c.expert + most;
  c.weight = reinterpret_cast<float*>(c.row + most * kCols);
  return c;
}
// Called by one block: publishes the lists for later kernels.
template <int kCols>
__device__ __forceinline__ void publish_lists(const routing::Copy& from, uint32_t expert_slots,
                                              const routing::Lists& to) {
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < expert_slots * kCols; i += blockDim.x) {
    const uint32_t at = i / kCols * uint32_t(routing::kTokens) + i % kCols;
    to.weight[at] = from.weight[i], to.row[at] = from.row[i];
    if (i % kCols == 0) to.expert[i / kCols] = from.expert[i / kCols];
  }
  if (threadIdx.x == 0) *to.count = expert_slots;
  ptx::fence_acq_rel_gpu();
  __syncthreads();
}

}  // namespace ingot::decode::small_batch
