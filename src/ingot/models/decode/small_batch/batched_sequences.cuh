#pragma once
// The kernels that only steps of several sequences need. They gather the tokens from the slots, attend to each
// sequence's own keys, and finally give every slot its logits, the id of its largest logit and its new position.
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/kernels/attention/decode.cuh"
#include "ingot/kernels/sampling/best.cuh"
#include "ingot/models/decode/phased/stages.cuh"
#include "ingot/models/decode/small_batch/batched_sequences.h"

namespace ingot::decode {

// Words that change from step to step are read past L1, because a kernel that starts while an earlier kernel runs may
// find stale cache lines.
__device__ __forceinline__ uint32_t slot_of(const BatchedSequences& s, uint32_t j) { return __ldcg(&s.input->slot[j]); }
template <class T> __device__ __forceinline__ T* of_slot(T* first, const BatchedSequences& s, uint32_t slot) {
  return reinterpret_cast<T*>(uintptr_t(first) + uintptr_t(slot) * uintptr_t(s.slot_bytes));
}

__global__ void gather_tokens_kernel(const __grid_constant__ BatchedSequences s, State* batch, uint32_t T) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t j = threadIdx.x;
  if (j >= T) return;
  const int32_t given = __ldcg(&s.input->token[j]);
  batch->tokens[j] = given >= 0 ? given : __ldcg(&of_slot(s.state, s, slot_of(s, j))->tokens[0]);
}

// `p` for the sequence of this block, which is its row `j` of the step.
template <int kDim>
__device__ __forceinline__ void point_to_sequence(const BatchedSequences& s, uint32_t j, decode_attention::Params& p) {
  const uint32_t slot = slot_of(s, j);
  p.position = &of_slot(s.state, s, slot)->position;
  p.keys = of_slot(p.keys, s, slot), p.values = of_slot(p.values, s, slot);
  p.qkv += size_t(j) * (p.heads + 2 * p.kv_heads) * p.dim;
  p.mixed += j * weight_tiles::vector_bytes(p.heads * p.dim);
  const size_t parts = size_t(j) * p.heads * p.parts;
  p.part_max += parts, p.part_sum += parts, p.part_out += parts * kDim;
  p.arrived = s.arrived + j * p.kv_heads * p.tiles;
}
template <int kDim>
__global__ void __launch_bounds__(decode_attention::kThreads)
    sequence_attention_kernel(const __grid_constant__ BatchedSequences s, decode_attention::Params p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t units = decode_attention::units_of(p);
  point_to_sequence<kDim>(s, blockIdx.x / units, p);
  decode_attention::attend<kDim>(p, blockIdx.x % units, tile::shared<decode_attention::Memory<kDim>>());
}
// For heads wider than 128 numbers, or with a softcap of scores.
__global__ void __launch_bounds__(decode_attention::kThreads)
    wide_sequence_attention_kernel(const __grid_constant__ BatchedSequences s, decode_attention::Params p,
                                   float softcap) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t units = decode_attention::units_of(p);
  point_to_sequence<kWideDim>(s, blockIdx.x / units, p);
  decode_attention::attend<kWideDim>(p, blockIdx.x % units, decode_attention::CappedScale{p.scale, softcap},
                                     *tile::dynamic_shared<decode_attention::Memory<kWideDim>>());
}

// --- draft steps

// `p` for row `j` of the step.
template <int kDim>
__device__ __forceinline__ void point_to_row(const BatchedSequences& s, uint32_t j, decode_attention::Params& p) {
  point_to_sequence<kDim>(s, j, p);
  p.position = &s.input->position[j];
}
// One block stores the key and the value of one row and key head.
template <int kDim>
__global__ void __launch_bounds__(decode_attention::kThreads)
    store_row_keys_kernel(const __grid_constant__ BatchedSequences s, decode_attention::Params p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  point_to_row<kDim>(s, blockIdx.x / p.kv_heads, p);
  const uint32_t key = uint32_t(__ldcg(p.position));
  decode_attention::store_keys<kDim>(p, {key, key + 1, key}, blockIdx.x % p.kv_heads, threadIdx.x);
}
template <int kDim>
__global__ void __launch_bounds__(decode_attention::kThreads)
    row_attention_kernel(const __grid_constant__ BatchedSequences s, decode_attention::Params p) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t units = decode_attention::units_of(p);
  point_to_row<kDim>(s, blockIdx.x / units, p);
  decode_attention::attend<kDim, false>(p, blockIdx.x % units, p.scale, tile::shared<decode_attention::Memory<kDim>>());
}
// For heads wider than 128 numbers, or with a softcap of scores.
__global__ void __launch_bounds__(decode_attention::kThreads)
    wide_row_attention_kernel(const __grid_constant__ BatchedSequences s, decode_attention::Params p, float softcap) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t units = decode_attention::units_of(p);
  point_to_row<kWideDim>(s, blockIdx.x / units, p);
  decode_attention::attend<kWideDim, false>(p, blockIdx.x % units, decode_attention::CappedScale{p.scale, softcap},
                                            *tile::dynamic_shared<decode_attention::Memory<kWideDim>>());
}
// Each slot keeps its rows up to the first whose sampled token is not the token of the next row. A sampled token of -1
// means that the device has not sampled the row.
__global__ void keep_accepted_kernel(const __grid_constant__ BatchedSequences s, const int32_t* sampled,
                                     const uint32_t* stop) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t first = threadIdx.x, count = __ldcg(&s.input->count);
  if (first >= count || is_stopped(stop)) return;
  const uint32_t slot = slot_of(s, first);
  if (first > 0 && slot_of(s, first - 1) == slot) return;
  uint32_t last = first;
  while (last + 1 < count && slot_of(s, last + 1) == slot &&
         __ldcg(sampled + last) == __ldcg(&s.input->token[last + 1]))
    ++last;
  State& state = *of_slot(s.state, s, slot);
  state.tokens[0] = max(__ldcg(sampled + last), 0);
  state.position = __ldcg(&s.input->position[last]) + 1;
}

// --- the results of a step of sequences

// One block processes one part of a row.
__global__ void __launch_bounds__(kThreads)
    scatter_logits_kernel(const __grid_constant__ BatchedSequences s, const float* rows, uint32_t V, uint32_t vocab) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  auto& m = tile::shared<sampling::BestMemory>();
  const uint32_t j = blockIdx.x / BatchedSequences::kBestParts, part = blockIdx.x % BatchedSequences::kBestParts;
  float* const to = of_slot(s.logits, s, slot_of(s, j));
  sampling::Best top;
  for (uint32_t v = part * kThreads + threadIdx.x; v < V; v += BatchedSequences::kBestParts * kThreads) {
    const float logit = __ldcg(rows + size_t(j) * V + v);
    to[v] = logit;
    if (v < vocab) top.add(logit, v);
  }
  const uint64_t key = sampling::block_best(top.key, m);
  if (threadIdx.x == 0) s.best[blockIdx.x] = key;
}
// One warp processes one sequence.
__global__ void append_tokens_kernel(const __grid_constant__ BatchedSequences s, const uint32_t* stop) {
  static_assert(BatchedSequences::kBestParts == 32, "a lane a part");
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  uint64_t key = __ldcg(s.best + threadIdx.x);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const uint64_t other = __shfl_xor_sync(~0u, key, mask);
    key = other > key ? other : key;
  }
  if (threadIdx.x % 32 != 0 || is_stopped(stop)) return;
  State& state = *of_slot(s.state, s, slot_of(s, threadIdx.x / 32));
  const sampling::SampledId sampled = sampling::sampled_id(key);
  state.tokens[0] = sampled.token;
  state.flaw |= sampled.flaw;
  state.position += 1;
}

}  // namespace ingot::decode
