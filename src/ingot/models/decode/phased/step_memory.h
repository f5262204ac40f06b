#pragma once
// The shared memory that the blocks of a step's launches need: pure functions of the model's sizes and the GPU's
// limits. phases.cuh launches with as many bytes.
#include <algorithm>
#include <cstdint>

#include "ingot/gpu/limits.h"
#include "ingot/models/decode/phased/decode.h"
#include "ingot/models/decode/small_batch/small_batch.cuh"

namespace ingot::decode {

// Shared memory of a block that fills its multiprocessor, less the part that the kernel declares itself.
inline int64_t shared_of_block(const gpu::Limits& limits) { return limits.smem_per_block - 1024; }
inline int64_t vector_stride(int64_t numbers) { return weight_tiles::vector_stride(uint32_t(numbers)); }

// --- the kernels for several tokens (small_batch.cuh)

// Whether a block has room for `bytes` beside the sums of T tokens and a ring with one slot for each warp.
inline bool small_batch_holds(uint32_t T, int64_t bytes, const gpu::Limits& limits) {
  return bytes + small_batch::least_bytes(T) <= shared_of_block(limits);
}
// The columns for which the kernels are compiled.
constexpr int64_t small_batch_columns(uint32_t T) { return T <= 8 ? 8 : 16; }
inline int64_t most_expert_slots(const DecoderSpec& c, uint32_t T) {
  return std::min<int64_t>(bank_experts(c), T * bank_choices(c));
}

// The need of down with `room` activation vectors of `width` numbers, for at most `most` expert slots.
inline int64_t down_bytes(uint32_t T, int64_t width, int64_t most, int64_t room) {
  const int64_t columns = small_batch_columns(T);
  return room * vector_stride(width) + routing::copy_bytes(most, columns) +
         small_batch::staged_bytes(room, most, columns);
}
// The number of activation vectors of down that a block should hold: 48 KB of vectors, and at least T, because all T
// tokens may choose the same expert.
inline int64_t wanted_vectors(uint32_t T, int64_t width) {
  return std::max<int64_t>(T, 48 * 1024 / vector_stride(width));
}
// The number of activation vectors that a block holds. If there is room for fewer vectors than wanted, a block
// processes its expert slots in more parts.
inline uint32_t staged_vectors(uint32_t T, int64_t width, int64_t most, const gpu::Limits& limits) {
  int64_t room = wanted_vectors(T, width);
  while (room > T && !small_batch_holds(T, down_bytes(T, width, most, room), limits)) --room;
  return uint32_t(room);
}

// The largest need of the experts' kernels, with `room` vectors of down.
inline int64_t experts_bytes(const DecoderSpec& c, uint32_t T, int64_t room) {
  const int64_t most = most_expert_slots(c, T);
  return std::max(T * vector_stride(c.hidden) + routing::copy_bytes(most, small_batch_columns(T)),
                  down_bytes(T, c.intermediate, most, room));
}
// Tokens of a step: 16, at most 8, or 1. With 99 KB of shared memory 48 KB of vectors leave no room for the kernels,
// and every token is a step.
inline uint32_t max_step_tokens(const DecoderSpec& c, const gpu::Limits& limits) {
  for (const uint32_t T : {16u, 8u, 7u, 6u, 5u, 4u, 3u, 2u}) {
    const int64_t experts = experts_bytes(c, T, wanted_vectors(T, c.intermediate));
    if (small_batch_holds(T, std::max(T * vector_stride(c.q_width()), experts), limits)) return T;
  }
  return 1;
}
// Whether the experts of a single token may take these kernels, as experts of rounded inputs do.
inline bool holds_rounded_experts(const DecoderSpec& c, const gpu::Limits& limits) {
  const uint32_t room = staged_vectors(1, c.intermediate, most_expert_slots(c, 1), limits);
  return small_batch_holds(1, experts_bytes(c, 1, room), limits);
}

// --- the kernels for one token

inline int64_t one_token_bytes(const DecoderSpec& c) {
  const int64_t k = most_expert_slots(c, 1), lists = routing::copy_bytes(k, 1);
  return std::max({vector_stride(c.q_width()), vector_stride(c.hidden) + lists,
                   bank_choices(c) * vector_stride(c.intermediate) + lists});
}

}  // namespace ingot::decode
