#pragma once
// The router of the row kernel. The blocks share the weight tiles of the router's matrix. Each block multiplies its
// tiles by the activation vectors of gate and up, which have the same order, and adds the products to the logits of all
// blocks. Then each block chooses the experts of all rows and lists the distinct experts.
#include "ingot/models/decode/phased/choose.cuh"
#include "ingot/models/decode/row_kernel/row_vectors.cuh"

namespace ingot::decode::rows {

// The weight tile of the router's matrix that this warp multiplies in turn `turn`; the warps of all blocks share the
// tiles.
__device__ __forceinline__ uint32_t router_tile(uint32_t turn) {
  return blockIdx.x + gridDim.x * (threadIdx.x / 32 + turn * kTokenWarps);
}
__device__ __forceinline__ const uint8_t* router_tile_data(const Matrix& w, uint32_t tile) {
  return w.data + tile / w.weight_tiles * w.row_tile_bytes +
         int64_t(tile % w.weight_tiles) * weight_tiles::Form<WeightFormat::bf16>::kBytes;
}
// Prefetches this warp's first weight tile into the L2 cache.
__device__ __forceinline__ void prefetch_router(const Matrix& w) {
  if (threadIdx.x % 32 == 0 && router_tile(0) < w.row_tiles * w.weight_tiles)
    ptx::prefetch_to_l2(router_tile_data(w, router_tile(0)), weight_tiles::Form<WeightFormat::bf16>::kBytes);
}
__device__ __forceinline__ void add_logits(const Context& block, const Matrix& w) {
  constexpr float kOutputScale = 1 / weight_tiles::Form<kExperts>::kInputScale;
  const uint32_t T = block.m.step.T, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4,
                 stride = weight_tiles::vector_stride(w.cols);
  const char* const mine[1] = {block.vectors() + min(g, T - 1) * stride + t * 16};
#pragma unroll 1
  for (uint32_t turn = 0;; ++turn) {
    const uint32_t tile = router_tile(turn);
    if (tile >= w.row_tiles * w.weight_tiles) return;
    weight_tiles::Stored<WeightFormat::bf16> held;
    weight_tiles::load<WeightFormat::bf16>(held, router_tile_data(w, tile), threadIdx.x % 32);
    float sum[1][4] = {};
    weight_tiles::multiply<WeightFormat::bf16, 1>(held, mine, tile % w.weight_tiles * weight_tiles::kVectorTileBytes,
                                                  sum);
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t e = 16 * (tile / w.weight_tiles) + g + i / 2 * 8, j = 2 * t + i % 2;
      if (e < w.rows && j < T) Sum::add(block.m.step.words.logits + j * w.rows + e, sum[0][i] * kOutputScale, 1);
    }
  }
}

// Reads the logits after all blocks have added to them.
__device__ __forceinline__ void read_logits(const Context& block, const Router& p, uint32_t layer) {
  constexpr uint32_t kWords = 3;
  const uint32_t all = block.m.step.T * p.w.rows;
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < all; first += kWords * kTokenThreads) {
    uint64_t word[kWords] = {};
    const auto load = [&] {
#pragma unroll
      for (uint32_t u = 0; u < kWords; ++u)
        if (first + u * kTokenThreads < all)
          word[u] = ptx::load_relaxed(block.m.step.words.logits + first + u * kTokenThreads);
    };
    load();
    block.wait_for(
        load,
        [&] {
          bool complete = true;
#pragma unroll
          for (uint32_t u = 0; u < kWords; ++u)
            complete &= (Sum::count(word[u]) == p.w.weight_tiles) | (first + u * kTokenThreads >= all);
          return complete;
        },
        wait_for_router(layer));
#pragma unroll
    for (uint32_t u = 0; u < kWords; ++u)
      if (first + u * kTokenThreads < all) block.choice().logits[first + u * kTokenThreads] = Sum::value(word[u]);
  }
}

// One warp chooses the experts of one row and computes their weights.
__device__ __forceinline__ void choose(const Context& block, const Router& p) {
  const uint32_t row = threadIdx.x / 32, lane = threadIdx.x % 32, E = p.w.rows;
  if (row >= block.m.step.T) return;
  const ChoiceMemory m = block.choice();
  float* const logits = m.logits + row * E;
  const float scale = block.rstd(row, p.eps);
  float logit[kLogitsOfLane] = {};
#pragma unroll
  for (uint32_t u = 0; u < kLogitsOfLane; ++u)
    if (lane + 32 * u < E) logits[lane + 32 * u] = logit[u] = logits[lane + 32 * u] * scale + p.bias[lane + 32 * u];
#pragma unroll 1
  for (uint32_t e = lane + 32 * kLogitsOfLane; e < E; e += 32) logits[e] = logits[e] * scale + p.bias[e];
  __syncwarp();
  choose_held(logits, logit, E, p.k, m.chosen + row * p.k);
  weigh(logits, p.k, m.chosen + row * p.k, m.weights + row * p.k);
}
// Lists the distinct experts, in three steps with barriers between them.
__device__ __forceinline__ void list_experts(const Context& block, const Router& p) {
  const ChoiceMemory m = block.choice();
  ExpertSlots& slots = block.m.slots;
  const uint32_t pairs = block.m.step.T * p.k, E = p.w.rows, lane = threadIdx.x % 32;
#pragma unroll 1
  for (uint32_t e = threadIdx.x; e < E; e += kTokenThreads) {
    uint32_t mask = 0;
#pragma unroll 1
    for (uint32_t j = 0; j < block.m.step.T; ++j)
#pragma unroll 4
      for (uint32_t i = 0; i < p.k; ++i) mask |= m.chosen[j * p.k + i] == e ? 1u << j : 0;
    m.first[e] = mask;
  }
  ComputeThreads::sync();
  if (threadIdx.x < 32) {
    uint32_t count = 0, before = 0;
#pragma unroll 1
    for (uint32_t first = 0; first < E; first += 32) {
      const uint32_t mask = first + lane < E ? m.first[first + lane] : 0, chosen = __ballot_sync(~0u, int(mask != 0));
      if (chosen == 0) continue;
      uint32_t sum = uint32_t(__popc(mask));  // sum over this lane and all lower lanes
#pragma unroll
      for (uint32_t by = 1; by < 32; by *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, sum, by);
        if (lane >= by) sum += other;
      }
      const uint32_t slot = count + uint32_t(__popc(chosen & ((1u << lane) - 1)));
      if (mask != 0) {
        slots.expert[slot] = int32_t(first + lane), slots.mask[slot] = mask;
        slots.before[slot] = before + sum - uint32_t(__popc(mask));
        m.first[first + lane] = slot;
      }
      count += uint32_t(__popc(chosen)), before += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) slots.count = count, slots.before[count] = before;
  }
  ComputeThreads::sync();
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < pairs; i += kTokenThreads) {
    const uint32_t slot = m.first[m.chosen[i]];
    slots.pair[slots.before[slot] + slots.place(slot, i / p.k)] = i;
  }
  ptx::barrier_sync_unaligned(kListedBarrier, kTokenThreads + 32);  // the copying warp waits here for the list
}
// Writes the lists in the form of the other paths, which tests and benchmarks read.
__device__ __forceinline__ void publish_lists(const Context& block, uint32_t layer) {
  const ExpertSlots& slots = block.m.slots;
  const routing::Lists& lists = block.m.step.lists;
  const int64_t n = layer * block.m.step.expert_slots;
  const routing::Lists to{lists.count + layer, lists.expert + n, lists.weight + n * routing::kTokens,
                          lists.row + n * routing::kTokens};
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < slots.count * uint32_t(routing::kTokens); i += kTokenThreads) {
    const uint32_t slot = i / uint32_t(routing::kTokens), row = i % uint32_t(routing::kTokens);
    const bool has = row < kRows && slots.has(slot, row);
    const uint32_t pair = has ? slots.pair[slots.before[slot] + slots.place(slot, row)] : 0;
    to.row[i] = has ? int32_t(pair) : -1;
    to.weight[i] = has ? block.choice().weights[pair] : 0;
    if (row == 0) to.expert[slot] = slots.expert[slot];
  }
  if (threadIdx.x == 0) *to.count = slots.count;
}

}  // namespace ingot::decode::rows
