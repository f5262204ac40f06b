#pragma once
// to = from        the same shape, any strides; between floating types rounded to nearest, ties to even
// to = value
//
// Both tensors lie on the CPU, both on one GPU, or one on each. Between CPU and GPU the type stays the same, and rows
// are one stride apart on either side. Such a copy is complete only when the stream has executed it. Until then the
// caller must not change host memory that is `from`, nor read host memory that is `to`. If host memory is not pinned
// (gpu/allocator.h), the call itself may wait for the copy.
#include "ingot/core/tensor.h"

namespace ingot {

struct Copy {
  Tensor from, to;  // must share no memory
};
void copy(const Copy& c, Stream stream);

// to[at + i] = from[i] for each row i. `at` is read when the stream reaches the copy, so the replays of a graph may
// write to different places. Both tensors have the same type, and rows without gaps. Rows that would lie outside of
// `to` are skipped.
struct CopyAt {
  Tensor from, to;  // (N, ...), (M, ...)
  Tensor at;        // (1) i32
};
void copy_at(const CopyAt& c, Stream stream);

struct Fill {
  Tensor to;
  double value = 0;  // for an integer type: a value that the type can hold
};
void fill(const Fill& f, Stream stream);

}  // namespace ingot
