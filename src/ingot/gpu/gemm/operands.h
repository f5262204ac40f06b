#pragma once
// The core's requirements on matrices in memory: rows of 16-bit operands begin at multiples of 16 bytes, and rows of
// results are whole multiples of 16 bytes. The copy engine writes in units of 16 bytes: the last unit of a row is
// written as a whole, beyond the end of a row with a partial unit.
#include <algorithm>
#include <cstdint>

#include "ingot/core/tensor.h"

namespace ingot::gemm {

// All but the last dimension as rows.
inline Tensor as_matrix(const Tensor& t) {
  if (!t) return t;
  Tensor m = t;
  m.shape = {t.rows(), t.cols()};
  m.stride[0] = t.rows() > 1 ? t.row_stride() : std::max(t.row_stride(), t.cols());
  m.stride[1] = 1;
  return m;
}

inline bool is_16_bit(DType t) { return t == DType::bf16 || t == DType::f16; }
template <class Use> void with_16_bit_type(DType t, Use&& use) {
  if (t == DType::bf16) return use(bf16{});
  use(f16{});
}

inline int64_t row_bytes(const Tensor& t) { return t.cols() * size_of(t.dtype); }
inline bool rows_are_whole(const Tensor& t) { return row_bytes(t) % 16 == 0; }
inline bool rows_are_aligned(const Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && as_matrix(t).row_stride() * size_of(t.dtype) % 16 == 0;
}

// For results: only the rows themselves are written.
inline void check_whole_rows(const char* name, const Tensor& t) {
  INGOT_CHECK(rows_are_whole(t), name, ": found rows of ", t.cols(), " elements of ", t.dtype, ", ", row_bytes(t),
              " bytes, expected a multiple of 16 bytes");
}
// For results: besides the rows, only the caller's padding after each row is written, up to the next multiple of 16
// bytes.
inline void check_padded_rows(const char* name, const Tensor& t) {
  const int64_t padded = (row_bytes(t) + 15) / 16 * 16, step = t.stride[t.rank() - 2] * size_of(t.dtype);
  INGOT_CHECK(step >= padded, name, ": found rows of ", row_bytes(t), " bytes that begin every ", step,
              ", expected every ", padded, " or more");
}

}  // namespace ingot::gemm
