#pragma once
// For pointwise kernels: a matrix cut into units of equal length (vectors or elements), each processed by one thread.
// Rows may lie any distance apart; where no operand has gaps the matrix is treated as a single long row, without a
// division.
#include <algorithm>

#include "ingot/core/tensor.h"
#include "ingot/gpu/tile/divide.cuh"

namespace ingot::tile {

// An operand: its first row and the distance between rows, in elements.
struct Rows {
  void* data = nullptr;
  int64_t stride = 0;
};

struct RowUnits {
  uint32_t units = 0;  // of this launch
  bool one_row = true;
  Divisor per_row;
};
// The row of a unit, and the unit's index within the row.
__device__ inline Division place_of(const RowUnits& u, uint32_t i) {
  if (u.one_row) return {0, i};
  return divide(i, u.per_row);
}
// The address of a unit of N elements in an operand.
template <class T, int N> __device__ inline T* at(const Rows& r, Division place) {
  return static_cast<T*>(r.data) + int64_t(place.quotient) * r.stride + int64_t(place.remainder) * N;
}

inline Rows rows_of(const Tensor& t) { return {t.data, t.row_stride()}; }
inline bool without_gaps(const Tensor& t) { return !t || t.rows() <= 1 || t.row_stride() == t.cols(); }
// Whether `bytes` can be moved at once at the start of every row.
inline bool rows_start_aligned(const Tensor& t, int64_t bytes) {
  return !t || (reinterpret_cast<uintptr_t>(t.data) % uintptr_t(bytes) == 0 &&
                (t.rows() <= 1 || t.row_stride() * size_of(t.dtype) % bytes == 0));
}

constexpr int64_t kMaxUnits = int64_t(1) << 30;  // of a launch: divide() needs less than 2^31

// Calls part(row, unit, RowUnits) with the first row and unit of every launch. There is one launch, except for matrices
// of more than kMaxUnits units.
template <class Part> void for_each_launch(int64_t rows, int64_t units_per_row, bool one_row, Part&& part) {
  if (one_row) units_per_row *= rows, rows = rows > 0 ? 1 : 0;
  if (units_per_row == 0) return;
  const int64_t wide = std::min(units_per_row, kMaxUnits), high = std::min(rows, kMaxUnits / wide);
  for (int64_t row = 0; row < rows; row += high)
    for (int64_t unit = 0; unit < units_per_row; unit += wide) {
      const int64_t now = std::min(wide, units_per_row - unit);
      RowUnits u;
      u.units = uint32_t(std::min(high, rows - row) * now);
      u.one_row = rows == 1;
      u.per_row = Divisor(uint32_t(now));
      part(row, unit, u);
    }
}
// The operand that begins at this row and element.
inline Rows moved(const Rows& r, int64_t row, int64_t element, DType t) {
  return {static_cast<char*>(r.data) + (row * r.stride + element) * size_of(t), r.stride};
}

}  // namespace ingot::tile
