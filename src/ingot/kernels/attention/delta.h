#pragma once
// Row sums that the backward pass needs for each query and head before its products.
#include "ingot/kernels/attention/attention.h"

namespace ingot::cuda {

// delta = sum of dO * O, less the gradient of lse, (H, T) with rows `stride` apart; not written if a.has_delta states
// that `delta` already contains these sums. Adds the gradient of the sinks to a.dsinks where that tensor is given.
// Expects at least one query.
void attention_row_sums(const AttentionBackward& a, float* delta, int64_t stride, Stream stream);

}  // namespace ingot::cuda
