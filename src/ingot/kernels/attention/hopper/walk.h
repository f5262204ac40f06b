#pragma once
// The arguments of a walk over tiles of queries (walk.cuh).
#include <cuda.h>

#include <cstdint>

#include "ingot/kernels/attention/claim_slots.h"

namespace ingot::cuda::attention_hopper {

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

struct WalkMaps {
  CUtensorMap rows[2], k, v;  // rows: Q, and dO in the backward pass
};

}  // namespace ingot::cuda::attention_hopper
