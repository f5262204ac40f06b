#pragma once
// Log softmax of rows of logits, in fp64: of one id of each row, and of the row's k likeliest ids, in falling order,
// equal logits by rising id. A GPU computes all rows at once, each by many blocks, and adds in a fixed order that
// differs from the CPU's.
#include "ingot/core/tensor.h"

namespace ingot {

struct Logprobs {
  Tensor logits;  // (R, V) f32, on the CPU also f64; or (V), one row shared by all other tensors
  Tensor token;   // (R) i32: an id below V
  Tensor top;     // (R, k) i32, k <= V, or none
  Tensor values;  // (R, 1 + k) f64: of `token`, then of the likeliest ids
  // As Sample::rows: only these rows are computed, each with its own number of ids (at least k). If left out, all rows
  // are computed.
  Tensor rows;
  Tensor workspace;  // u8, logprobs_workspace_bytes() for the number of rows; none on the CPU
};
// The bytes of the workspace. A GPU makes k passes over the parts of a row, so k should be small.
int64_t logprobs_workspace_bytes(int64_t V, int64_t k, Device device, int64_t rows = 1);
void logprobs(const Logprobs& l, Stream stream);

}  // namespace ingot
