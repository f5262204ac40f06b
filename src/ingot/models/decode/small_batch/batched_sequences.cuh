#pragma once
// The kernels that only steps of several sequences need. They gather the tokens from the slots, attend to each
// sequence's own keys, and finally give every slot its logits, the id of its largest logit and its new position.
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/models/decode/phased/stages.cuh"
#include "ingot/models/decode/small_batch/slot_rows.cuh"

namespace ingot::decode {

__global__ void gather_tokens_kernel(const __grid_constant__ BatchedSequences s, State* batch, uint32_t T) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint32_t j = threadIdx.x;
  if (j >= T) return;
  const int32_t given = __ldcg(&s.input->token[j]);
  // A slot without a token has the id -1.
  batch->tokens[j] = given >= 0 ? given : max(__ldcg(&in_slot(s.state, s, slot_of(s, j))->tokens[0]), 0);
}

// Makes `p` the parameters of sequence `j` of the step.
template <int kDim>
__device__ __forceinline__ void point_to_sequence(const BatchedSequences& s, uint32_t j, decode_attention::Params& p) {
  point_to_slot(s, j, p);
  p.mixed += j * weight_tiles::vector_bytes(p.heads * p.dim);
  p.arrived = s.arrived;
  point_to_parts<kDim>(j, p);
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

// The same for row `j` of a draft step, whose position is that of its own token.
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
  State& state = *in_slot(s.state, s, slot);
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
  const uint64_t key = scatter_logits<kThreads>(s, j, part, rows, V, vocab, m);
  if (threadIdx.x == 0) s.best[blockIdx.x] = key;
}
// One warp processes one sequence.
__global__ void append_tokens_kernel(const __grid_constant__ BatchedSequences s, const uint32_t* stop) {
  ptx::let_next_kernel_start();
  ptx::wait_for_earlier_kernels();
  const uint64_t key = best_of_parts(s.best + threadIdx.x);
  if (threadIdx.x % 32 != 0 || is_stopped(stop)) return;
  State& state = *in_slot(s.state, s, slot_of(s, threadIdx.x / 32));
  set_best(state, key);
  state.position += 1;
}

}  // namespace ingot::decode
