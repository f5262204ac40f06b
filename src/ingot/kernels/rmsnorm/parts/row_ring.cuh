#pragma once
// Shared by persistent kernels that walk over rows: a ring in shared memory in which every thread fills and reads only
// its own part, and positions in operands that advance row by row.
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/ptx/grid.cuh"
#include "ingot/kernels/rmsnorm/rmsnorm_config.h"
#include "ingot/kernels/rmsnorm/rmsnorm_device.cuh"

namespace ingot::cuda {

// A thread's private 16-byte slots in shared memory, `kCount` per thread, interleaved by warp: conflict-free, at a
// constant stride.
template <int kCount> class OwnPieces {
 public:
  __device__ explicit OwnPieces(uint4* memory) : at_(memory + threadIdx.x / 32 * (32 * kCount) + threadIdx.x % 32) {}
  __device__ uint4* operator[](int piece) const { return at_ + piece * 32; }
  // The next or a later set of all threads' pieces.
  __device__ OwnPieces after(uint32_t sets) const {
    OwnPieces p = *this;
    p.at_ += sets * kCount * blockDim.x;
    return p;
  }

 private:
  uint4* at_;
};

// A thread's `count` vectors of a row: vectors first, first + step, ...
struct Lanes {
  uint32_t first, step;
  int count;
};

// Copies with the hint to keep the lines in L2, so that written lines leave L2 first (load_keeping in memory.cuh).
template <class T, int N> __device__ inline void copy_vector(uint4* to, const T* from) {
  using Vec = tile::Vec<T, N>;
#pragma unroll
  for (int i = 0; i < Vec::kBytes / Vec::kPiece; ++i) {
    const uint32_t at = ptx::shared_address(to + i * 32);
    const char* const piece = reinterpret_cast<const char*>(from) + i * Vec::kPiece;
    if constexpr (Vec::kPiece == 16)
      ptx::cp_async_keeping(at, piece);
    else
      ptx::cp_async<Vec::kPiece>(at, piece);
  }
}
template <class T, int N> __device__ inline void read_vector(tile::Vec<T, N>& v, const uint4* from) {
  using Vec = tile::Vec<T, N>;
  struct alignas(Vec::kPiece) Piece {
    uint32_t w[Vec::kPiece / 4];
  };
#pragma unroll
  for (int i = 0; i < Vec::kBytes / Vec::kPiece; ++i) {
    const Piece piece = *reinterpret_cast<const Piece*>(from + i * 32);
#pragma unroll
    for (int k = 0; k < Vec::kPiece / 4; ++k) v.word[i][k] = piece.w[k];
  }
}

// A thread's place in one operand: its first column in the first of the rows in work. An offset, because the operand
// may be absent. kTwoStrides: rows have two strides, so the offset of a row is computed from the operand's start.
template <class T, bool kTwoStrides> class RowWalk {
 public:
  __device__ RowWalk(T* base, const RowMap& map, uint32_t inner, uint32_t row, uint32_t column)
      : at_(address(base, map, inner, row, column)) {}
  // Row `r` of the rows in work, where the first row has number `first`.
  __device__ T* row(T* base, const RowMap& map, uint32_t inner, uint32_t first, int r, uint32_t column) const {
    if (kTwoStrides && inner != 0) return reinterpret_cast<T*>(address(base, map, inner, first + r, column));
    return reinterpret_cast<T*>(at_ + r * map.outer_stride * sizeof(T));
  }
  __device__ void advance(const RowMap& map, uint32_t rows) { at_ += rows * map.outer_stride * sizeof(T); }

 private:
  __device__ static uint64_t address(T* base, const RowMap& map, uint32_t inner, uint32_t row, uint32_t column) {
    return reinterpret_cast<uint64_t>(base) +
           (offset(map, row_index(kTwoStrides ? inner : 0, row)) + column) * sizeof(T);
  }
  uint64_t at_;
};

// The rows in work of a group: `left` rows of the matrix from `row` on, 0 when the group is done.
struct RowPlace {
  uint32_t row, left;
  __device__ bool has(int r) const { return left > uint32_t(r); }
  __device__ RowPlace after(uint32_t rows) const { return {row + rows, left > rows ? left - rows : 0}; }
};

// Waits until all of a thread's groups of copies except the last `n` are complete.
__device__ inline void wait_for_copies(uint32_t n) {
  if (n == 0)
    ptx::cp_async_wait_group<0>();
  else if (n == 1)
    ptx::cp_async_wait_group<1>();
  else if (n == 2)
    ptx::cp_async_wait_group<2>();
  else
    ptx::cp_async_wait_group<kMaxStages - 1>();
}

}  // namespace ingot::cuda
