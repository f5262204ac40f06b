#pragma once
// The arguments of the functions in linear.simd.cpp and linear_tiles.simd.cpp, which simd_calls.h declares. Plain
// structs only, because the object files of every CPU level include them.
#include <cstdint>

namespace ingot::detail {

// c = alpha * a b + beta * add + bias. The caller may process each finished tile.
template <class T> struct Gemm {
  int64_t m = 0, n = 0, k = 0;
  const T* a = nullptr;  // a[i * a_row + p * a_col], one of the two strides is 1
  int64_t a_row = 0, a_col = 1;
  const T* b = nullptr;  // b[p * b_row + j * b_col], one of the two strides is 1
  int64_t b_row = 0, b_col = 1;
  T* c = nullptr;  // c[i * ldc + j]
  int64_t ldc = 0;
  const T* add = nullptr;  // read only where beta != 0; may be c
  int64_t ld_add = 0;
  const T* bias = nullptr;   // (n) or null
  void* packed_b = nullptr;  // all chunks of b, packed before and only read; or null
  T alpha = 1, beta = 0;
  bool round = false;  // rounds both operands to bf16 first
  bool words = false;  // by bf16 dot products: needs `round`, and chunks of an even number of steps
  bool thin = false;   // a few last columns by dot products, where both operands lie along the sum
  bool lower = false;  // only micro-tiles with elements of the lower triangle
};

// A slice of the sum and of the columns whose operands are packed at one time. Operands that are not packed are read in
// place.
struct GemmChunk {
  int64_t k_begin = 0, k_end = 0, n_begin = 0, n_end = 0;
  void* packed_a = nullptr;  // all row panels, where a_col != 1; or null
  void* packed = nullptr;    // ceil((n_end - n_begin) / cols) panels; or null, where b_col == 1 and n is whole vectors
};

// Column panels of a chunk and steps of its sum, counted from the chunk's beginning, that one task packs.
struct GemmPackRange {
  int64_t panel_begin, panel_end, p_begin, p_end;
};

// Micro-tile of a CPU level: `rows` x `cols` accumulators stay in registers.
struct GemmTile {
  int rows = 0, cols = 0;
};

// A tile of c: rows are counted in row panels, columns in column panels of the chunk.
struct GemmRange {
  int64_t row_panel_begin, row_panel_end, col_panel_begin, col_panel_end;
};

// Row panels are balanced, so that all have nearly the same number of rows: panel i of `panels` begins here.
constexpr int64_t panel_begin(int64_t i, int64_t m, int64_t panels) { return i * m / panels; }

}  // namespace ingot::detail
