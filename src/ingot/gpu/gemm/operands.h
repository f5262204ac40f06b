#pragma once
// The core's requirements on matrices in memory: rows of 16-bit operands begin at multiples of 16 bytes, and rows of
// results are whole multiples of 16 bytes. The copy engine writes in units of 16 bytes: the last unit of a row is
// written as a whole, beyond the end of a row with a partial unit.
#include <algorithm>
#include <cstdint>

#include "ingot/core/tensor.h"

namespace ingot::gemm {

// How a pair of matrices is one operand, without a copy:
//     stacked    the first half of a tile's rows comes from the first matrix, the second half from the second: the sums
//                of both products are in the same thread, half of the tile's columns apart
//     chained    K runs through the first matrix, then through the second: C = A1 B1^T + A2 B2^T
//     by_batch   batch 0 is the first matrix, batch 1 the second
// none is a single matrix, or one for each batch, and `same` a single matrix for every batch.
enum class Pair : uint8_t { none, stacked, chained, by_batch, same };

// t as (batch, rows, cols), for a single kind of maps and coordinates.
inline Tensor as_bank(const Tensor& t) {
  if (t.rank() == 3) return t;
  Tensor bank = t;
  bank.shape = {1, t.rows(), t.cols()};
  bank.stride[0] = std::max<int64_t>(t.rows(), 1) * t.row_stride();
  bank.stride[1] = t.row_stride();
  bank.stride[2] = 1;
  return bank;
}

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
