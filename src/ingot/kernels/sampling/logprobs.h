#pragma once
// Log softmax of a row of logits, in doubles: of one id, and of the k likeliest, likeliest first, of equal ones the
// lower id. A GPU adds up in an order of its own, always the same.
#include "ingot/core/tensor.h"

namespace ingot {

struct Logprobs {
  Tensor logits;     // (V) f32, on the CPU f64 too
  Tensor token;      // (1) i32: an id below V
  Tensor top;        // (k) i32, k <= V; or none
  Tensor values;     // (1 + k) f64: of `token`, of the likeliest
  Tensor workspace;  // u8, of logprobs_workspace_bytes(); on the CPU none
};
// On a GPU k passes over parts of the row: for small k.
int64_t logprobs_workspace_bytes(int64_t V, int64_t k, Device device);
void logprobs(const Logprobs& l, Stream stream);

}  // namespace ingot
