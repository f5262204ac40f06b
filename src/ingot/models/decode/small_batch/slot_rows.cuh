#pragma once
// Device code of steps of several sequences, by the small-batch kernels (batched_sequences.cuh) and by the matrix
// kernels (batch/batch.cu): the slot of a row, the row's operands of attention, and the results that go to the slot.
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/kernels/attention/decode.cuh"
#include "ingot/kernels/sampling/best.cuh"
#include "ingot/models/decode/small_batch/batched_sequences.h"

namespace ingot::decode {

// Words that change from step to step are read past L1, because a kernel that starts while an earlier kernel runs may
// find stale cache lines.
__device__ __forceinline__ uint32_t slot_of(const BatchedSequences& s, uint32_t j) { return __ldcg(&s.input->slot[j]); }
// The address in a slot of an array whose address in the first slot is `first`.
template <class T> __device__ __forceinline__ T* in_slot(T* first, const BatchedSequences& s, uint32_t slot) {
  return reinterpret_cast<T*>(uintptr_t(first) + uintptr_t(slot) * uintptr_t(s.slot_bytes));
}

// Makes the parameters of attention those of row `j` of the step: position, keys and values of the row's slot, and the
// row's queries. The caller moves the results' row (Params::mixed or mixed_rows).
__device__ __forceinline__ void point_to_slot(const BatchedSequences& s, uint32_t j, decode_attention::Params& p) {
  const uint32_t slot = slot_of(s, j);
  p.position = &in_slot(s.state, s, slot)->position;
  p.keys = in_slot(p.keys, s, slot), p.values = in_slot(p.values, s, slot);
  p.qkv += size_t(j) * (p.heads + 2 * p.kv_heads) * p.dim;
}
// The same for the memory of the parts of the row's keys.
template <int kDim> __device__ __forceinline__ void point_to_parts(uint32_t j, decode_attention::Params& p) {
  const size_t parts = size_t(j) * p.heads * p.parts;
  p.part_max += parts, p.part_sum += parts, p.part_out += parts * kDim;
  p.arrived += j * p.kv_heads * p.tiles;
}

// Copies part `part` of row `j` of the logits (T, V) to the row's slot. Returns the largest logit of the part among the
// ids below `vocab`, with its id, to thread 0. Called by a block of kThreads threads.
template <uint32_t kThreads>
__device__ __forceinline__ uint64_t scatter_logits(const BatchedSequences& s, uint32_t j, uint32_t part,
                                                   const float* rows, uint32_t V, uint32_t vocab,
                                                   sampling::BestMemory& m) {
  float* const to = in_slot(s.logits, s, slot_of(s, j));
  sampling::Best top;
  for (uint32_t v = part * kThreads + threadIdx.x; v < V; v += BatchedSequences::kBestParts * kThreads) {
    const float logit = __ldcg(rows + size_t(j) * V + v);
    to[v] = logit;
    if (v < vocab) top.add(logit, v);
  }
  return sampling::block_best(top.key, m);
}
// The largest logit of a row, with its id, in all lanes of a warp. Each lane passes the address of the key of one part.
__device__ __forceinline__ uint64_t best_of_parts(const uint64_t* part) {
  static_assert(BatchedSequences::kBestParts == 32, "each lane of a warp has one part of a row");
  uint64_t key = __ldcg(part);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, key, mask);
    key = other > key ? other : key;
  }
  return key;
}
// The greedy token of `key` becomes the slot's last sampled token.
__device__ __forceinline__ void set_best(State& state, uint64_t key) {
  const sampling::SampledId sampled = sampling::sampled_id(key);
  state.tokens[0] = sampled.token;
  state.flaw |= sampled.flaw;
}

}  // namespace ingot::decode
