#pragma once
// Pure functions of shapes and strides: whether two tensors overlap, and the fewest loops over both.
#include "ingot/core/tensor.h"

namespace ingot::detail {

// Loops over both tensors, the innermost loop last. Unused loops come first and have size 1. Adjacent dimensions that
// are contiguous in both tensors are merged.
struct Strided {
  int64_t dim[kMaxRank], from[kMaxRank], to[kMaxRank];
};
Strided strided(const Tensor& from, const Tensor& to);

// Whether rows are one stride apart, and the stride is at least the length of a row.
bool rows_apart(const Tensor& t);

// Whether the tensors may share memory. Exact where one tensor lies before the other, or where both are column ranges
// of one matrix; otherwise true.
bool may_overlap(const Tensor& a, const Tensor& b);

}  // namespace ingot::detail
