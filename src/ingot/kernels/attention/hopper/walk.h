#pragma once
// The arguments of a walk over tiles of queries (walk.cuh).
#include <cuda.h>

#include "ingot/kernels/attention/claim_slots.h"
#include "ingot/kernels/attention/parts/walk.h"

namespace ingot::cuda::attention_hopper {

using namespace attention_parts;

struct WalkMaps {
  CUtensorMap rows[2], k, v;  // rows: Q, and dO in the backward pass
};

}  // namespace ingot::cuda::attention_hopper
