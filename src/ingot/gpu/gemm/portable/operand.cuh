#pragma once
// An operand of the portable core: 16-bit matrices that all threads of a block copy to shared memory by cp.async, with
// zeros beyond their edges. The orders in memory and the pairs are those of gemm::Operand (../operand.cuh).
//
// A step of kStepK elements of K in shared memory, and its reads by ldmatrix without bank conflicts:
//     K-major    rows of kStepK elements, 64 or 128 bytes; the 16-byte chunks of a row are swizzled (tile/swizzle.cuh)
//     MN-major   panels of 64 of the tile's rows: kStepK rows of 128 bytes, swizzled by b128; reads transpose
#include "ingot/gpu/gemm/operands.h"
#include "ingot/gpu/gemm/schedule.h"
#include "ingot/gpu/ptx/cp_async_or_zero.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/settle.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/swizzle.cuh"

namespace ingot::gemm {

using ptx::Major;

}  // namespace ingot::gemm

namespace ingot::gemm::portable {

// A bank of matrices in memory, in bytes; `rows` of the product, `k` elements of K.
struct Matrix {
  const char* data = nullptr;
  int64_t stride = 0, batch_stride = 0;
  uint32_t rows = 0, k = 0;
};
// A chunk has 8 elements from `first` on. Returns how many bytes of the chunk exist.
__device__ __forceinline__ uint32_t bytes_of_chunk(uint32_t first, uint32_t end) {
  return first < end ? min(16u, 2 * (end - first)) : 0;
}

template <class T, Major kMajorOf, int kTileRows, bool, Pair kPair = Pair::none> struct Operand {
  static_assert(sizeof(T) == 2, "a chunk of 16 bytes is 8 elements");
  static constexpr Major kMajor = kMajorOf;
  static constexpr int kMatrices = kPair == Pair::none || kPair == Pair::same ? 1 : 2;

  struct Params {
    Matrix of[kMatrices];
    uint32_t steps = 0;  // for chained: the steps of the first matrix, of kTileK elements each
  };

  template <int = 1> static Params params(const char* name, const Tensor& first, const Tensor& second = {}) {
    Params p;
    p.of[0] = matrix(name, first);
    if constexpr (kMatrices == 2) p.of[1] = matrix(name, second);
    if constexpr (kPair == Pair::chained) p.steps = uint32_t(ceil_div(p.of[0].k, kTileK));
    return p;
  }

  // The operand of a step in shared memory: kRows of the product's rows, or columns, by Block::kStepK elements of K,
  // which the Block::kThreads threads of a block copy.
  template <int kRows, class Block> struct Staged {
    static constexpr int kStepK = Block::kStepK;
    static constexpr uint32_t kBytes = kRows * kStepK * 2, kPanelBytes = kStepK * 128;
    static constexpr bool kByRow = kMajor == Major::k;  // a chunk is 8 elements of K of one row, or one element of K of
                                                        // 8 rows
    static constexpr uint32_t kRowBytes = kByRow ? kStepK * 2 : 128;
    static constexpr tile::Swizzle kSwizzle = kRowBytes == 64 ? tile::Swizzle::b64 : tile::Swizzle::b128;
    static_assert(kRowBytes == 64 || kRowBytes == 128, "a row is as wide as a swizzle");
    // A thread's copies of a tile's steps, in their order: kCopies chunks of 16 bytes for each step. Addresses are
    // those of the next step, so that a copy takes few instructions.
    static constexpr int kCopies = int(kBytes) / 16 / Block::kThreads;
    class Copies {
     public:
      // The tile's rows from `row` on.
      __device__ __forceinline__ Copies(const Params& p, const TileAt& t, uint32_t row) : p_(&p), tile_(&t), row_(row) {
        if constexpr (kPair == Pair::chained) first_steps_ = p.steps * Block::kStepsOfTileK;
        begin(kPair == Pair::chained && first_steps_ == 0);
      }
      // The number of whole steps, counted from the first step: all their elements of K exist, and each chunk exists
      // completely or not at all.
      __device__ __forceinline__ uint32_t whole_steps() const {
        const auto steps = [&](bool second) {
          const Matrix& m = matrix(0, second);
          return kByRow || m.rows % 8 == 0 ? m.k / kStepK : 0;
        };
        if constexpr (kPair != Pair::chained) return steps(false);
        const uint32_t first = p_->steps * Block::kStepsOfTileK;
        return steps(false) < first ? steps(false) : first + steps(true);
      }
      // Requests copy i of the next step into the operand's memory at `to`. kWhole: the step is one of the whole steps.
      template <bool kWhole> __device__ __forceinline__ void request(uint32_t to, uint32_t i) const {
        const char* const from = from_[i / kOfSide] + i % kOfSide * rows_[i / kOfSide];
        to += to_ + i * kAtOnce * kRowBytes;
        const bool present = (present_ >> i & 1) != 0;
        if constexpr (kWhole)
          ptx::cp_async_or_zero(to, from, present);
        else if constexpr (kByRow)
          ptx::cp_async<16>(to, from, present ? uint32_t(min(max(2 * left_, 0), 16)) : 0);
        else
          ptx::cp_async<16>(to, from, left_ > int32_t(i * kAtOnce) ? bytes_ : 0);
      }
      // Call when all copies of a step have been requested.
      __device__ __forceinline__ void advance() {
        left_ -= kStepK;
#pragma unroll
        for (uint32_t side = 0; side < kSides; ++side)
          from_[side] += kByRow ? kStepK * 2 : kStepK / kAtOnce * rows_[side];
        if constexpr (kPair == Pair::chained)
          if (first_steps_ > 0 && --first_steps_ == 0) begin(true);
      }

     private:
      // Copy i of a thread lies kAtOnce rows behind copy i - 1. A row takes kRowBytes of shared memory.
      static constexpr uint32_t kChunks = kByRow ? kStepK / 8 : kRows / 8, kAtOnce = Block::kThreads / kChunks;
      static constexpr uint32_t kSides = kByRow && kPair == Pair::stacked ? 2 : 1;  // matrices from which this thread
                                                                                    // copies
      static constexpr uint32_t kOfSide = kCopies / kSides;
      static_assert((kByRow ? kRows : kStepK) == kCopies * kAtOnce && kAtOnce % 8 == 0 && kOfSide * kSides == kCopies,
                    "each thread copies as many chunks, at the same place of a row and of the swizzle's pattern");
      static_assert(kPair != Pair::stacked || kByRow || kChunks == 16, "the two panels are those of the two matrices");

      __device__ __forceinline__ const Matrix& matrix([[maybe_unused]] uint32_t side,
                                                      [[maybe_unused]] bool second) const {
        if constexpr (kPair == Pair::stacked) return p_->of[kByRow ? side : threadIdx.x % kChunks / 8];
        if constexpr (kPair == Pair::chained) return p_->of[second];
        if constexpr (kPair == Pair::by_batch) return p_->of[tile_->batch];
        return p_->of[0];
      }
      __device__ __forceinline__ void begin(bool second) {
        const uint32_t chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks;
        const uint32_t row = kPair == Pair::stacked ? row_ / 2 : row_;
        const uint32_t batch = kPair == Pair::by_batch || kPair == Pair::same ? 0 : tile_->batch;
        present_ = 0;
#pragma unroll
        for (uint32_t side = 0; side < kSides; ++side) {
          const Matrix& m = matrix(side, second);
          from_[side] = m.data + batch * m.batch_stride;
          rows_[side] = int64_t(kAtOnce) * m.stride;
          if constexpr (kByRow) {
            to_ = tile::swizzled<kSwizzle>(first, chunk * 16);
            from_[side] += (row + first) * m.stride + chunk * 16;
#pragma unroll
            for (uint32_t i = 0; i < kOfSide; ++i)
              present_ |= uint32_t(row + first + i * kAtOnce < m.rows) << (side * kOfSide + i);
            left_ = int32_t(m.k) - int32_t(chunk * 8);
          } else {
            to_ = chunk / 8 * kPanelBytes + tile::swizzled<kSwizzle>(first, chunk % 8 * 16);
            const uint32_t column = row + (kPair == Pair::stacked ? chunk % 8 : chunk) * 8;
            from_[side] += first * m.stride + int64_t(column) * 2;
            left_ = int32_t(m.k) - int32_t(first);
            bytes_ = bytes_of_chunk(column, m.rows);
            if (bytes_ > 0) present_ = (1 << kCopies) - 1;
          }
          // Without these lines the compiler computes the addresses anew for each copy.
          ptx::settle(from_[side]);
        }
        ptx::settle(present_), ptx::settle(to_);
      }

      const Params* p_;
      const TileAt* tile_;
      uint32_t row_, to_ = 0, first_steps_ = 0;
      const char* from_[kSides];
      int64_t rows_[kSides];
      uint32_t present_ = 0;  // a bit for each copy whose row, or column, exists
      int32_t left_ = 0;      // remaining elements of K, counted from this thread's first element
      uint32_t bytes_ = 0;    // MN-major: bytes of a chunk that exist
    };

    // A lane's address for ldmatrix of a left operand: the tile's rows from `row` on, a multiple of 64.
    static __device__ __forceinline__ uint32_t left_address(uint32_t row, uint32_t lane) {
      if constexpr (kByRow) return row * kRowBytes + tile::swizzled<kSwizzle>(lane % 16, lane / 16 * 16);
      return row / 64 * kPanelBytes + tile::swizzled<kSwizzle>(lane % 8 + lane / 16 * 8, lane / 8 % 2 * 16);
    }
    // The same for a right operand.
    static __device__ __forceinline__ uint32_t right_address(uint32_t row, uint32_t lane) {
      if constexpr (kByRow)
        return row * kRowBytes + tile::swizzled<kSwizzle>(lane / 16 * 8 + lane % 8, lane / 8 % 2 * 16);
      return row / 64 * kPanelBytes + tile::swizzled<kSwizzle>(lane % 8 + lane / 8 % 2 * 8, lane / 16 * 16);
    }
    // Loads 16 rows by 16 elements of K: rows 16 i from the address on, i < 4, elements 16 k.
    static __device__ __forceinline__ void fragment(uint32_t (&r)[4], uint32_t address, int i, int k) {
      if constexpr (kByRow)
        ptx::ldmatrix(r, (address ^ uint32_t(32 * k)) + uint32_t(i) * 16 * kRowBytes);
      else
        ptx::ldmatrix_trans(r, (address ^ uint32_t(32 * i)) + uint32_t(k) * 16 * kRowBytes);
    }
  };

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
};

}  // namespace ingot::gemm::portable
