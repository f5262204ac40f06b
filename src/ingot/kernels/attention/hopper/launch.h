#pragma once
// The Hopper variant of attention (docs/attention.md): wgmma, tensor copies, claimed work items.
#include "ingot/core/tensor.h"
#include "ingot/kernels/attention/attention.h"

namespace ingot::cuda {

// The slot of the counter for the items of a launch's blocks (claim_slots.h).
uint32_t claim_slot(Stream stream, Device device);

namespace attention_hopper {

void forward(const Attention& a, Stream stream);
// The bytes of memory beside delta: for dS, or for fp32 sums of dQ, to which many blocks add in any order; 0 where a
// separate kernel computes dQ from the scores.
int64_t backward_bytes(const AttentionBackward& a);
// `delta` is the result of attention_row_sums(), where there are queries. `memory` has backward_bytes(a) bytes, or is
// null.
void backward(const AttentionBackward& a, float* delta, void* memory, Stream stream);

}  // namespace attention_hopper
}  // namespace ingot::cuda
