#pragma once
// Operands in shared memory, and the products that a warp computes from them.
//
// An operand is rows of kWidth elements of 16 bits: panels of 64 columns, whose rows of 128 bytes follow each other.
// The 16-byte chunks of a row are swizzled (chunk ^= row % 8), so that the eight rows that ldmatrix reads at once lie
// in different banks. A warp reads through an address of its own for each lane; the chunk of 16 columns i of a panel is
// reached by address ^ 32 * (i % 4), because operands begin at multiples of 128 bytes.
#include "ingot/gpu/ptx/address.cuh"
#include "ingot/gpu/ptx/cp_async_or_zero.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/mma.cuh"
#include "ingot/kernels/attention/parts/fragments.cuh"
#include "ingot/kernels/attention/portable/portable.h"

namespace ingot::cuda::attention_portable {

constexpr uint32_t kRowBytes = 128;

// Requests kRows rows from `from` on; rows from `rows` on and columns from `width` on become zeros. Called by all
// threads.
template <int kWidth, int kRows, int kThreads>
__device__ __forceinline__ void load_rows(uint32_t to, const char* from, int64_t row_bytes, int rows, int width) {
  constexpr uint32_t kChunks = kWidth / 8, kAtOnce = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kAtOnce == 0, "each thread keeps its column");
  static_assert((kAtOnce & (kAtOnce - 1)) == 0,
                "a row's low bits are the thread's, or those of the row that it starts at");
  const uint32_t chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
  const int my_rows = 8 * int(chunk) < width ? rows - int(first) : 0;
  from += first * row_bytes + chunk * 16;
  to += (chunk / 8 * kRows + first) * kRowBytes + ((chunk ^ first) % 8) * 16;
#pragma unroll
  for (uint32_t i = 0; i < kRows; i += kAtOnce) {
    ptx::cp_async_or_zero((to ^ (i % 8 * 16)) + i * kRowBytes, from, int(i) < my_rows);
    from += kAtOnce * row_bytes;
  }
}

// The lane's address for the left operand of a product over columns: 16 rows, 16 columns at a time.
__device__ __forceinline__ uint32_t left_address(uint32_t operand, uint32_t lane) {
  return operand + (lane % 16) * kRowBytes + ((lane / 16) ^ (lane % 8)) * 16;
}
// The same for the right operand, whose rows are the product's columns: 16 rows, 16 columns at a time.
__device__ __forceinline__ uint32_t right_address(uint32_t operand, uint32_t lane) {
  return operand + (lane / 16 * 8 + lane % 8) * kRowBytes + ((lane / 8 % 2) ^ (lane % 8)) * 16;
}
// The same for the right operand of a product over its rows: 16 rows, 16 columns at a time.
__device__ __forceinline__ uint32_t summed_address(uint32_t operand, uint32_t lane) {
  return left_address(operand, lane);
}

// Columns 16 i to 16 i + 15 of an operand of kRows rows, at a lane's address.
template <int kRows> __device__ __forceinline__ uint32_t columns_at(uint32_t address, int i) {
  return (address ^ uint32_t(32 * (i % 4))) + uint32_t(i / 4) * kRows * kRowBytes;
}

template <class T>
__device__ __forceinline__ void multiply_16(float* d, const uint32_t (&a)[4], const uint32_t (&b)[4]) {
  const uint32_t low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
  ptx::mma_m16n8k16(T{}, *reinterpret_cast<float(*)[4]>(d), a, low);
  ptx::mma_m16n8k16(T{}, *reinterpret_cast<float(*)[4]>(d + 4), a, high);
}

// The left operand of a warp: 16 kTiles rows of one operand, from shared memory or kept in registers.
template <int kWidth, int kRows, int kTiles, bool kHeld> struct Left {
  uint32_t address;
  uint32_t held[kHeld ? kTiles : 1][kHeld ? kWidth / 16 : 1][4];

  __device__ __forceinline__ void hold() {
    if constexpr (kHeld) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int i = 0; i < kWidth / 16; ++i)
          ptx::ldmatrix(held[m][i], columns_at<kRows>(address, i) + uint32_t(16 * m) * kRowBytes);
    }
  }
  __device__ __forceinline__ void get(uint32_t (&a)[4], int m, int i) const {
    if constexpr (kHeld) {
#pragma unroll
      for (int r = 0; r < 4; ++r) a[r] = held[m][i][r];
    } else {
      ptx::ldmatrix(a, columns_at<kRows>(address, i) + uint32_t(16 * m) * kRowBytes);
    }
  }
};

// d += the products of column group i, 16 columns of the left rows, with kColumns right rows.
template <class T, int kRightRows, int kColumns, int kTiles, class L>
__device__ __forceinline__ void multiply_columns(float (&d)[kTiles][kColumns / 2], const L& left, uint32_t right,
                                                 int i) {
  uint32_t a[kTiles][4];
#pragma unroll
  for (int m = 0; m < kTiles; ++m) left.get(a[m], m, i);
#pragma unroll
  for (int n = 0; n < kColumns / 16; ++n) {
    uint32_t b[4];
    ptx::ldmatrix(b, columns_at<kRightRows>(right, i) + uint32_t(16 * n) * kRowBytes);
#pragma unroll
    for (int m = 0; m < kTiles; ++m) multiply_16<T>(d[m] + 8 * n, a[m], b);
  }
}

// d += the products of x, 16 kTiles rows by kSummed columns in registers, with kSummed rows of kWidth columns.
template <class T, int kWidth, int kSummed, int kTiles>
__device__ __forceinline__ void multiply_rows(float (&d)[kTiles][kWidth / 2], const float (&x)[kTiles][kSummed / 2],
                                              uint32_t rows) {
#pragma unroll
  for (int i = 0; i < kSummed / 16; ++i) {
    uint32_t a[kTiles][4];
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 4; ++r) a[m][r] = ptx::pack(T{}, x[m][8 * i + 2 * r], x[m][8 * i + 2 * r + 1]);
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
      uint32_t b[4];
      ptx::ldmatrix_trans(b, columns_at<kSummed>(rows, n) + uint32_t(16 * i) * kRowBytes);
#pragma unroll
      for (int m = 0; m < kTiles; ++m) multiply_16<T>(d[m] + 8 * n, a[m], b);
    }
  }
}

// A window in 32 bits, which are enough for rows and columns.
__device__ __forceinline__ int window_of(const Walk& w) { return int(min(w.window, int64_t(1) << 30)); }

template <int kTiles, int N> __device__ __forceinline__ void clear(float (&d)[kTiles][N]) {
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (float& x : d[m]) x = 0;
}

// The address of a row, and the distance of rows in bytes.
template <class T> __device__ __forceinline__ const char* row_at(const Source& s, int64_t token, int head) {
  return reinterpret_cast<const char*>(static_cast<const T*>(s.data) + token * s.strides.token + head * s.strides.head);
}
template <class T> __device__ __forceinline__ int64_t row_bytes(const Source& s) {
  return s.strides.token * int64_t(sizeof(T));
}

}  // namespace ingot::cuda::attention_portable
