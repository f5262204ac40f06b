#include "ingot/kernels/copy/copy_plan.h"

#include <algorithm>
#include <cstdint>

namespace ingot::detail {
namespace {

struct Extent {
  int64_t first, end;  // addresses
};
Extent extent(const Tensor& t) {
  int64_t low = 0, high = 0;
  for (int i = 0; i < t.rank(); ++i) {
    const int64_t reach = (t.shape.dim[i] - 1) * t.stride[i];
    (reach < 0 ? low : high) += reach;
  }
  const int64_t at = int64_t(reinterpret_cast<uintptr_t>(t.data)), width = size_of(t.dtype);
  return {at + low * width, at + (high + 1) * width};
}

}  // namespace

Strided strided(const Tensor& from, const Tensor& to) {
  Strided s;
  int last = kMaxRank;  // the loops found so far are elements `last` and later of the arrays of s
  for (int i = to.rank() - 1; i >= 0; --i) {
    const int64_t n = to.shape.dim[i];
    if (n == 1) continue;
    if (last < kMaxRank && from.stride[i] == s.from[last] * s.dim[last] && to.stride[i] == s.to[last] * s.dim[last]) {
      s.dim[last] *= n;
      continue;
    }
    --last;
    s.dim[last] = n, s.from[last] = from.stride[i], s.to[last] = to.stride[i];
  }
  if (last == kMaxRank) --last, s.dim[last] = to.numel(), s.from[last] = s.to[last] = 1;
  while (last > 0) --last, s.dim[last] = 1, s.from[last] = s.to[last] = 0;
  return s;
}

bool rows_apart(const Tensor& t) { return t.rows_uniform() && (t.rows() <= 1 || t.row_stride() >= t.cols()); }

bool may_overlap(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  const Extent x = extent(a), y = extent(b);
  if (x.end <= y.first || y.end <= x.first) return false;
  const int64_t step = a.row_stride() * size_of(a.dtype);
  if (!rows_apart(a) || !rows_apart(b) || step != b.row_stride() * size_of(b.dtype) || a.rows() < 2 || b.rows() < 2)
    return true;
  // The rows of both tensors repeat every `step` bytes, so only the offsets of the two tensors within one period
  // matter.
  const int64_t away = ((y.first - x.first) % step + step) % step;
  return away < a.cols() * size_of(a.dtype) || step - away < b.cols() * size_of(b.dtype);
}

}  // namespace ingot::detail
