#pragma once
// The choice of experts in the row kernel. The blocks that publish the activation vectors of gate and up have added the
// router's logits (row_vectors.cuh). Each block reads the logits, one warp for each row, chooses the experts of all
// rows and lists the distinct experts.
#include "ingot/models/decode/phased/choose.cuh"
#include "ingot/models/decode/row_kernel/row_vectors.cuh"

namespace ingot::decode::rows {

// The logits of this warp's row, requested before the row's activation vector has been copied.
class RowLogits {
 public:
  __device__ __forceinline__ void load(const Context& block, const Router& p, uint32_t epoch) {
    load_words(block, p, epoch);
#pragma unroll
    for (uint32_t u = 0; u < kLogitsOfLane; ++u)
      if (const uint32_t e = threadIdx.x % 32 + 32 * u; e < p.w.rows) bias[u] = p.bias[e];
  }
  // Chooses the experts of the row. Call after RowSquares::finish().
  __device__ __forceinline__ void choose(const Context& block, const Router& p, uint32_t epoch) {
    const uint32_t row = threadIdx.x / 32, lane = threadIdx.x % 32, E = p.w.rows;
    const auto is_complete = [&](uint64_t w) { return Sum::count(w) == p.w.weight_tiles; };
    block.read_again([&] { load_words(block, p, epoch); },
                     [&] {
                       bool complete = true;
#pragma unroll
                       for (uint32_t u = 0; u < kLogitsOfLane; ++u)
                         complete &= is_complete(word[u]) | (lane + 32 * u >= E);
                       return complete;
                     });
    const ChoiceMemory m = block.choice();
    float* const logits = m.logits + row * E;
    const float scale = block.m.rstd[row];
    float logit[kLogitsOfLane] = {};
#pragma unroll
    for (uint32_t u = 0; u < kLogitsOfLane; ++u)
      if (lane + 32 * u < E) logits[lane + 32 * u] = logit[u] = Sum::value(word[u]) * scale + bias[u];
    __syncwarp();
    choose_held(logits, logit, E, p.k, m.chosen + row * p.k);
    if (lane < p.k) atomicOr(&m.first[m.chosen[row * p.k + lane]], 1u << row);
  }

 private:
  __device__ __forceinline__ void load_words(const Context& block, const Router& p, uint32_t epoch) {
#pragma unroll
    for (uint32_t u = 0; u < kLogitsOfLane; ++u)
      if (const uint32_t e = threadIdx.x % 32 + 32 * u; e < p.w.rows)
        word[u] = ptx::load_relaxed(block.logits(epoch, threadIdx.x / 32) + e);
  }
  uint64_t word[kLogitsOfLane] = {};
  float bias[kLogitsOfLane] = {};
};
// A choice is one of the k experts that a row has chosen. One warp computes the weights of its row's k choices: the
// softmax of their logits.
__device__ __forceinline__ void weigh_choices(const Context& block, const Router& p) {
  const ChoiceMemory m = block.choice();
  const uint32_t row = threadIdx.x / 32;
  weigh(m.logits + row * p.w.rows, p.k, m.chosen + row * p.k, m.weights + row * p.k);
}
// Clears the masks of rows, one for each expert, which choose() fills. A barrier must follow before choose().
__device__ __forceinline__ void clear_masks(const Context& block) {
#pragma unroll 1
  for (uint32_t e = threadIdx.x; e < block.m.step.experts; e += kTokenThreads) block.choice().first[e] = 0;
}
// Lists the distinct experts. Called after a barrier. Another barrier must follow before the pairs are read.
__device__ __forceinline__ void list_experts(const Context& block, const Router& p) {
  constexpr uint32_t kEach = 4;  // neighbouring experts of a lane
  const ChoiceMemory m = block.choice();
  ExpertSlots& slots = block.m.slots;
  const uint32_t pairs = block.m.step.T * p.k, E = p.w.rows;
  if (threadIdx.x < 32) {
    uint32_t total = 0;  // the number of slots, and from bit 16 the number of pairs
#pragma unroll 1
    for (uint32_t first = kEach * threadIdx.x; first - kEach * threadIdx.x < E; first += 32 * kEach) {
      uint32_t mask[kEach], sum = 0;
#pragma unroll
      for (uint32_t u = 0; u < kEach; ++u) {
        mask[u] = first + u < E ? m.first[first + u] : 0;
        sum += uint32_t(mask[u] != 0) + (uint32_t(__popc(mask[u])) << 16);
      }
      uint32_t end = sum;  // sum over this lane and all lower lanes
#pragma unroll
      for (uint32_t by = 1; by < 32; by *= 2) {
        const uint32_t other = __shfl_up_sync(~0u, end, by);
        if (threadIdx.x >= by) end += other;
      }
      uint32_t before = total + end - sum;
#pragma unroll
      for (uint32_t u = 0; u < kEach; ++u) {
        if (mask[u] == 0) continue;
        const uint32_t slot = before % 65536;
        slots.expert[slot] = int32_t(first + u);
        slots.mask[slot] = uint8_t(mask[u]), slots.before[slot] = uint8_t(before >> 16);
        m.first[first + u] = slot;
        before += 1 + (uint32_t(__popc(mask[u])) << 16);
      }
      total += __shfl_sync(~0u, end, 31);
    }
    if (threadIdx.x == 0) slots.count = total % 65536, slots.before[total % 65536] = uint8_t(total >> 16);
  }
  ptx::barrier_sync_unaligned(kListedBarrier, kTokenThreads + 32);  // the copying warp waits here for the list
#pragma unroll 1
  for (uint32_t i = threadIdx.x; i < pairs; i += kTokenThreads) {
    const uint32_t slot = m.first[m.chosen[i]], row = i / p.k, at = slots.before[slot] + slots.place(slot, row);
    slots.pair[at] = uint8_t(i), slots.row[at] = uint8_t(row);
    slots.offset[at] = uint16_t(
        (row * uint32_t(block.m.step.words.turn_bytes) + (i - row * p.k) * block.m.step.words.pair_bytes) / 16);
  }
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
