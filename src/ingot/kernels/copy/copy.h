#pragma once
// to = from        the same shape, any strides; between floating types rounded to nearest, ties to even
// to = value
//
// Both lie on the CPU, both on one GPU, or one on each. Between the two the type stays, and rows are one stride apart
// on either side. Such a copy is over when the stream has come to it: until then host memory must stay as it is
// (`from`) or must not be read (`to`). Where host memory is not pinned (gpu/allocator.h) the call itself may take until
// then.
#include "ingot/core/tensor.h"

namespace ingot {

struct Copy {
  Tensor from, to;  // that share no memory
};
void copy(const Copy& c, Stream stream);

// to[at + i] = from[i] for each row i, where `at` is read when the stream comes to it: so a graph's replays may put
// rows in other places. Of one type; rows without gaps. Rows that would lie outside of `to` are left out.
struct CopyAt {
  Tensor from, to;  // (N, ...), (M, ...)
  Tensor at;        // (1) i32
};
void copy_at(const CopyAt& c, Stream stream);

struct Fill {
  Tensor to;
  double value = 0;  // of an integer type: one that it can hold
};
void fill(const Fill& f, Stream stream);

}  // namespace ingot
