#pragma once
// Pure functions of shapes and strides: what two tensors share, and the fewest loops that reach both.
#include "ingot/core/tensor.h"

namespace ingot::detail {

// Loops over both tensors, the innermost last; in front sizes of 1. Neighbours that are one run in both are merged.
struct Strided {
  int64_t dim[kMaxRank], from[kMaxRank], to[kMaxRank];
};
Strided strided(const Tensor& from, const Tensor& to);

// Whether rows are one stride apart, at least as far as a row is long.
bool rows_apart(const Tensor& t);

// Whether an element of one may lie in an element of the other. Exact where one of them lies before the other or where
// both are rows of one matrix, side by side; else true.
bool may_overlap(const Tensor& a, const Tensor& b);

}  // namespace ingot::detail
