#pragma once
// How a portable kernel divides a tile of 256 rows of weights by kWidth rows of x among eight warps, and its shared
// memory: a ring of stages of 64 columns of MXFP4, or 32 columns of bf16 or fp8, at most 99 KB.
//
// The warps of a tile of MXFP4 or fp8 lie one above another, each with 32 rows of weights and all rows of x, so that a
// weight is decoded once. Weights in bf16 need no decoding but four times the reads of MXFP4, so in a wide tile two
// warps lie side by side, with 64 rows of weights and half of the rows of x each: every read of x serves twice as many
// products. Otherwise reads of shared memory would take longer than the products.
#include "ingot/gpu/tile/swizzle.cuh"
#include "ingot/kernels/grouped/portable/portable.h"
#include "ingot/kernels/grouped/schedule.h"
#include "ingot/kernels/quant/weight_tile_product.cuh"

namespace ingot::cuda::grouped_portable {

constexpr int kWarps = kThreads / 32;
constexpr uint32_t kMostMemory = 99 * 1024;
constexpr uint32_t kHeldGroups = 256;  // the number of groups whose offsets are kept in shared memory

template <WeightFormat F, int kWidth> struct Form {
  static constexpr int kAcross = F == WeightFormat::bf16 && kWidth == 128 ? 2 : 1;
  // The row tiles of weights and the rows of x of a warp.
  static constexpr int kBandsOfWarp = int(kBands) * kAcross / kWarps, kRows = kWidth / kAcross;
  // The sizes of a stage: its columns, its products of 16 columns each, and the bytes of a row tile, of the weights, of
  // a row of x and of x.
  static constexpr int kColumns = F == WeightFormat::mxfp4 ? 64 : 32, kProducts = kColumns / 16;
  static constexpr uint32_t kBand = weight_tiles::Form<F>::kBytes * kColumns / 64, kA = kBands * kBand;
  static constexpr uint32_t kRowBytes = kColumns * 2, kB = kWidth * kRowBytes;
  static constexpr tile::Swizzle kSwizzle = kColumns == 64 ? tile::Swizzle::b128 : tile::Swizzle::b64;
  static constexpr uint32_t kFit = (kMostMemory - 1280) / (kA + kB), kStages = kFit < 4 ? kFit : 4;
  static_assert(kStages >= 3, "one stage is read, the next one is complete, and a third one arrives");
};

template <WeightFormat F, int kWidth> struct Memory {
  using L = Form<F, kWidth>;
  alignas(1024) char b[L::kStages][L::kB];
  alignas(128) char a[L::kStages][L::kA];
  Tile tile[2];    // this tile and the next one, in turn; a tile without rows follows the last one
  Walk walk;       // of thread 0
  uint32_t tiles;  // of all groups, for thread 0, where blocks claim tiles
  int32_t offsets[kHeldGroups + 1];
};

template <WeightFormat F, int kWidth> __device__ __forceinline__ uint32_t next_stage(uint32_t stage) {
  return stage + 1 == Form<F, kWidth>::kStages ? 0 : stage + 1;
}

}  // namespace ingot::cuda::grouped_portable
