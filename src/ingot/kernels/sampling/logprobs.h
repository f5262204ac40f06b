#pragma once
// Log softmax of rows of logits, in doubles: of one id of each row, and of the row's k likeliest, likeliest first, of
// equal ones the lower id. A GPU computes all rows at once, each by many blocks, and adds up in an order of its own,
// always the same.
#include "ingot/core/tensor.h"

namespace ingot {

struct Logprobs {
  Tensor logits;     // (R, V) f32, on the CPU f64 too; or (V): one row, of all tensors
  Tensor token;      // (R) i32: an id below V
  Tensor top;        // (R, k) i32, k <= V; or none
  Tensor values;     // (R, 1 + k) f64: of `token`, of the likeliest
  Tensor rows;       // as Sample::rows: only these rows, each of its ids alone (k at most so many); or none: all
  Tensor workspace;  // u8, of logprobs_workspace_bytes() for the number of rows; on the CPU none
};
// On a GPU k passes over parts of the row: for small k.
int64_t logprobs_workspace_bytes(int64_t V, int64_t k, Device device, int64_t rows = 1);
void logprobs(const Logprobs& l, Stream stream);

}  // namespace ingot
