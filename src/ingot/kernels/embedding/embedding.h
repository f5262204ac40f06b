#pragma once
// y[t,:] = table[ids[t],:]  (+ y when accumulate)        dtable[ids[t],:] += dy[t,:]
#include "ingot/core/tensor.h"

namespace ingot {

struct Embedding {
  Tensor ids;    // (T) i32, each in [0, V); an error names the first id outside; on a GPU the row of such an id is NaNs
  Tensor table;  // (V, C)
  Tensor y;      // (T, C)
  bool accumulate = false;
};
void embedding(const Embedding& a, Stream stream);

struct EmbeddingBackward {
  Tensor ids, dy;  // (T) i32, (T, C); on a GPU ids outside are skipped, and dy may be bf16 or f16
  Tensor dtable;   // (V, C) f32 or f64, accumulated in token order
};
void embedding_backward(const EmbeddingBackward& a, Stream stream);

}  // namespace ingot
