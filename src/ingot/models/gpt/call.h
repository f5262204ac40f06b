#pragma once
// The model's vocabulary: what a model is made for, and what one call of it is given.
#include <vector>

#include "ingot/core/tensor.h"
#include "ingot/kernels/linear/linear.h"

namespace ingot {

// What a model is bound to; fixed at its construction.
struct GptOptions {
  int64_t capacity = 0;   // most tokens of one call
  bool looping = false;   // which of the two layer programs
  bool training = false;  // keeps what the backward pass needs
  Products products = Products::fp32;
  int64_t max_adapter_rank = 0;  // largest rank of the adapters passed later; 0: none
  int64_t max_positions = 0;     // rotary positions that may occur; 0: the config's context
};

// Packed documents. All i32. positions count from 0 inside a segment; targets may be left out where no loss is wanted.
struct TokenBatch {
  Tensor tokens, targets, positions;  // (T)
  Tensor cu_seqlens;                  // (S + 1)
};

// Low-rank adapters, one set per document (segment) and application:  delta(x) = (x A^T) B^T.
struct AdapterPair {
  Tensor a, b;
};  // (S, R, in), (S, out, R); empty: none
struct ApplicationAdapters {
  AdapterPair q, k, v, o, mlp;
};  // o reads the block's normed input, mlp bypasses the MLP
struct GptAdapters {
  std::vector<ApplicationAdapters> applications;
  AdapterPair head;  // added to the logits before the softcap
};

}  // namespace ingot
