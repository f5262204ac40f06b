#pragma once
// The arguments of the kernels of all variants.
#include <cstdint>

namespace ingot::cuda::attention_parts {

// Tokens and heads of an operand lie this many elements apart.
struct Strides {
  int64_t token, head;
};

struct Walk {
  const int32_t *cu_q, *cu_k;
  int segments, heads, group;  // group: query heads per key head
  int heads_in_set;            // heads whose operands fit in L2 together
  int64_t key_rows;            // of k and v
  int64_t window;
  bool causal;
  int64_t places;  // tile_places() of the queries
  uint32_t slot;   // of the counter of claimed items (claim_slots.h)
};

// The arguments of both kernels of the backward pass from the scores and the forward pass. delta: for each query and
// head, the sum of dO * O.
struct ScoreParams {
  const float *lse, *delta;  // (H, Tq), rows lse_stride and delta_stride apart
  int64_t lse_stride, delta_stride;
  float scale;            // of a score
  float scale_log2;       // the same, to powers of two
  float cap_in, cap_out;  // as in the forward pass
  int width;
};

// The arguments of a forward kernel.
struct ForwardParams {
  Walk walk;
  void* out;
  Strides out_strides;
  float* lse;  // (H, Tq), rows lse_stride apart; null: not wanted
  int64_t lse_stride;
  const void* sinks;  // (H) of T or f32; null: none
  bool sinks_f32;
  int width;              // of a head, a multiple of 8
  float scale_log2;       // of a score, to powers of two
  float cap_in, cap_out;  // capped: cap_out * tanh(cap_in * score), in powers of two; cap_out = 0: cap_in * score
};

}  // namespace ingot::cuda::attention_parts
