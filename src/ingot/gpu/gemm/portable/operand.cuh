#pragma once
// An operand of the portable core: 16-bit matrices that all threads of a block copy to shared memory by cp.async, with
// zeros beyond their edges. The orders in memory and the pairs are those of gemm::Operand (../operand.cuh).
//
// A step of kStepK elements of K in shared memory, and its reads by ldmatrix without bank conflicts:
//     K-major    kRows rows of 64 bytes; the 16-byte chunks of a row are swizzled by b64 (tile/swizzle.cuh)
//     MN-major   panels of 64 of the tile's rows: kStepK rows of 128 bytes, swizzled by b128; reads transpose
#include "ingot/gpu/gemm/operands.h"
#include "ingot/gpu/gemm/schedule.h"
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/swizzle.cuh"

namespace ingot::gemm {

using ptx::Major;

}  // namespace ingot::gemm

namespace ingot::gemm::portable {

constexpr int kStepK = 32, kBlockThreads = 128;
constexpr uint32_t kStepsOfTileK = kTileK / kStepK;  // schedules count steps of kTileK

// A bank of matrices in memory, in bytes; `rows` of the product, `k` elements of K.
struct Matrix {
  const char* data = nullptr;
  int64_t stride = 0, batch_stride = 0;
  uint32_t rows = 0, k = 0;
};
// The number of bytes that exist of a chunk of 8 elements from `first` on.
__device__ __forceinline__ uint32_t bytes_of_chunk(uint32_t first, uint32_t end) {
  return first < end ? min(16u, 2 * (end - first)) : 0;
}

template <class T, Major kMajorOf, int kRows, bool, Pair kPair = Pair::none> struct Operand {
  static_assert(sizeof(T) == 2 && kRows == 128, "each of 128 threads copies four chunks of 8 elements");
  static constexpr Major kMajor = kMajorOf;
  static constexpr uint32_t kBytes = kRows * kStepK * 2, kPanelBytes = kStepK * 128;
  static constexpr int kMatrices = kPair == Pair::none || kPair == Pair::same ? 1 : 2;

  struct Params {
    Matrix of[kMatrices];
    uint32_t steps = 0;  // for chained: the steps of the first matrix
  };

  template <int = 1> static Params params(const char* name, const Tensor& first, const Tensor& second = {}) {
    Params p;
    p.of[0] = matrix(name, first);
    if constexpr (kMatrices == 2) p.of[1] = matrix(name, second);
    if constexpr (kPair == Pair::chained) p.steps = uint32_t(ceil_div(p.of[0].k, kTileK)) * kStepsOfTileK;
    return p;
  }

  // Requests step `step` of the tile's rows from `row` on. Called by all threads of the block.
  static __device__ __forceinline__ void load(const Params& p, uint32_t to, const TileAt& t, uint32_t row,
                                              uint32_t step) {
    const bool second = kPair == Pair::chained && step >= p.steps;
    const uint32_t k = (second ? step - p.steps : step) * kStepK;
    const uint32_t batch = kPair == Pair::by_batch || kPair == Pair::same ? 0 : t.batch;
    const auto matrix_of = [&](uint32_t half) -> const Matrix& {
      if constexpr (kPair == Pair::stacked) return p.of[half];
      if constexpr (kPair == Pair::chained) return p.of[second];
      if constexpr (kPair == Pair::by_batch) return p.of[t.batch];
      return p.of[0];
    };
    if constexpr (kMajor == Major::k)
      load_rows_of_k(matrix_of, to, row, k, batch);
    else
      load_rows_across_k(matrix_of, to, row, k, batch);
  }

  // A lane's address for ldmatrix of a left operand: the tile's rows from `row` on, a multiple of 32.
  static __device__ __forceinline__ uint32_t left_address(uint32_t operand, uint32_t row, uint32_t lane) {
    if constexpr (kMajor == Major::k)
      return operand + tile::swizzled<tile::Swizzle::b64>(row + lane % 16, lane / 16 * 16);
    else
      return operand + row / 64 * kPanelBytes +
             tile::swizzled<tile::Swizzle::b128>(lane % 8 + lane / 16 * 8, row % 64 * 2 + lane / 8 % 2 * 16);
  }
  // The same for a right operand, from the tile's first row on.
  static __device__ __forceinline__ uint32_t right_address(uint32_t operand, uint32_t lane) {
    if constexpr (kMajor == Major::k)
      return operand + tile::swizzled<tile::Swizzle::b64>(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 16);
    else
      return operand + tile::swizzled<tile::Swizzle::b128>(lane % 8 + lane / 8 % 2 * 8, lane / 16 * 16);
  }
  // Loads 16 rows by 16 elements of K: rows 16 i from the address on, elements 16 k.
  static __device__ __forceinline__ void fragment(uint32_t (&r)[4], uint32_t address, int i, int k) {
    if constexpr (kMajor == Major::k)
      ptx::ldmatrix(r, (address ^ uint32_t(32 * k)) + uint32_t(i) * 16 * 64);
    else
      ptx::ldmatrix_trans(r,
                          (address ^ uint32_t(32 * (i % 4))) + uint32_t(i / 4) * kPanelBytes + uint32_t(k) * 16 * 128);
  }

 private:
  static Matrix matrix(const char* name, const Tensor& t) {
    const Tensor bank = as_bank(t);
    const int64_t row = bank.stride[1] * 2, batch = bank.stride[0] * 2;
    INGOT_CHECK(reinterpret_cast<uintptr_t>(bank.data) % 16 == 0 && row % 16 == 0 && batch % 16 == 0, name,
                ": found rows at ", bank.data, " that begin every ", row, " bytes, expected multiples of 16 bytes");
    const bool by_k = kMajor == Major::k;
    return {static_cast<const char*>(bank.data), row, batch, uint32_t(bank.size(by_k ? 1 : 2)),
            uint32_t(bank.size(by_k ? 2 : 1))};
  }
  // K-major: a thread copies one chunk of every 32nd row.
  template <class MatrixOf>
  static __device__ __forceinline__ void load_rows_of_k(MatrixOf&& matrix_of, uint32_t to, uint32_t row, uint32_t k,
                                                        uint32_t batch) {
    constexpr uint32_t kChunks = kStepK / 8, kAtOnce = kBlockThreads / kChunks;
    const uint32_t chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
    to += tile::swizzled<tile::Swizzle::b64>(first, chunk * 16);
    constexpr uint32_t kOfMatrix = kPair == Pair::stacked ? kRows / 2 : kRows;
    if (kPair == Pair::stacked) row /= 2;
#pragma unroll
    for (uint32_t half = 0; half < kRows / kOfMatrix; ++half) {
      const Matrix& m = matrix_of(half);
      const uint32_t valid = bytes_of_chunk(k + chunk * 8, m.k);
      const char* const from = m.data + batch * m.batch_stride + (row + first) * m.stride + (k + chunk * 8) * 2;
#pragma unroll
      for (uint32_t i = 0; i < kOfMatrix; i += kAtOnce)
        ptx::cp_async<16>(to + (half * kOfMatrix + i) * 64, from + i * m.stride, row + first + i < m.rows ? valid : 0);
    }
  }
  // MN-major: a thread copies one chunk of the tile's rows, of every 8th element of K.
  template <class MatrixOf>
  static __device__ __forceinline__ void load_rows_across_k(MatrixOf&& matrix_of, uint32_t to, uint32_t row, uint32_t k,
                                                            uint32_t batch) {
    constexpr uint32_t kChunks = kRows / 8, kAtOnce = kBlockThreads / kChunks;
    const uint32_t chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks, half = chunk / 8;
    to += half * kPanelBytes + tile::swizzled<tile::Swizzle::b128>(first, chunk % 8 * 16);
    const Matrix& m = matrix_of(half);
    const uint32_t column = kPair == Pair::stacked ? row / 2 + chunk % 8 * 8 : row + chunk * 8;
    const uint32_t valid = bytes_of_chunk(column, m.rows);
    const char* const from = m.data + batch * m.batch_stride + (k + first) * m.stride + column * 2;
#pragma unroll
    for (uint32_t i = 0; i < kStepK; i += kAtOnce)
      ptx::cp_async<16>(to + i * 128, from + i * m.stride, k + first + i < m.k ? valid : 0);
  }
};

}  // namespace ingot::gemm::portable
