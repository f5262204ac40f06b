#pragma once
// An operand source brings an operand's part of a stage to shared memory. The core requires of a source:
//     kMajor, kBytes                      the order of a stage in shared memory (tile/descriptor.cuh), and its size
//     Params                              the source's parameters, a part of the kernel's argument
//     load<kCluster>(params, to, tile, row, step, barrier, rank)
//                                         called by a single thread: starts the copies of step `step`
// In every block of the cluster, kBytes arrive on `barrier`, whichever block starts the copies. Each block has its own
// rows of A. In a cluster both blocks use the same rows of B, and each block loads a part of these rows for both.
//
// The source Operand is 16-bit matrices by tensor copies, with zeros beyond their edges. In memory the matrices are
//     K-major    (rows, K) row-major: X and W of X W^T
//     MN-major   (K, rows) row-major: W of dY W, and both operands of dY^T X, without a transposition, because wgmma
//                reads either order
// A pair of matrices can be one operand without a copy (Pair, operands.h).
//
// The source GroupedRows is an MN-major matrix whose rows of K are divided among the products of a GroupedSums: a
// product begins at any row, and its last stage also holds rows of the next product.
#include <cuda.h>

#include "ingot/gpu/gemm/operands.h"
#include "ingot/gpu/gemm/schedule.h"
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#include "ingot/gpu/ptx/wgmma.cuh"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tma_map.h"

namespace ingot::gemm {

using ptx::Major;

// kShared: the blocks of a cluster need the same rows, as of B.
template <class T, Major kMajorOf, int kRows, bool kShared, Pair kPair = Pair::none> struct Operand {
  static_assert(sizeof(T) == 2, "stages hold 64 elements of K in 128 bytes");
  static constexpr Major kMajor = kMajorOf;
  static constexpr uint32_t kBytes = kRows * 128;
  static constexpr int kMaps = kPair == Pair::none || kPair == Pair::same ? 1 : 2;
  static constexpr int kMapRows = kPair == Pair::stacked ? kRows / 2 : kRows;  // rows that a stage takes from one map
  static_assert(kMajor == Major::k || kMapRows % 64 == 0, "MN-major panels are 64 rows wide");

  struct Params {
    CUtensorMap map[kMaps];
    uint32_t steps = 0;  // for chained: the steps of the first matrix
  };

  // Rows of a copy, K-major: the two blocks of a cluster halve the rows of a map.
  template <int kCluster> static constexpr int box_rows() {
    return kShared && kPair != Pair::stacked ? kMapRows / kCluster : kMapRows;
  }
  template <int kCluster> static Params params(const char* name, const Tensor& first, const Tensor& second = {}) {
    const gpu::TmaBox box{
        .rows = kMajor == Major::k ? box_rows<kCluster>() : kTileK, .cols = 64, .swizzle = tile::Swizzle::b128};
    Params p;
    p.map[0] = gpu::tensor_map(name, as_bank(first), box);
    if constexpr (kMaps == 2) p.map[1] = gpu::tensor_map(name, as_bank(second), box);
    if constexpr (kPair == Pair::chained)
      p.steps = uint32_t(ceil_div(kMajor == Major::k ? first.cols() : first.rows(), kTileK));
    return p;
  }

  template <int kCluster>
  static __device__ __forceinline__ void load(const Params& p, char* to, const TileAt& t, uint32_t row, uint32_t step,
                                              uint64_t* barrier, uint32_t rank) {
    if constexpr (kPair == Pair::stacked) {
      // `row` counts the tile's rows; each matrix gives half of these rows.
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i)
        if (kCluster == 1 || !kShared || rank == i)
          load_rows<kCluster, false>(&p.map[i], to + i * kBytes / 2, row / 2, step * kTileK, t.batch, barrier, rank);
    } else if constexpr (kPair == Pair::chained) {
      const bool second = step >= p.steps;
      load_rows<kCluster, kShared>(&p.map[second], to, row, (second ? step - p.steps : step) * kTileK, t.batch, barrier,
                                   rank);
    } else if constexpr (kPair == Pair::by_batch) {
      load_rows<kCluster, kShared>(&p.map[t.batch], to, row, step * kTileK, 0, barrier, rank);
    } else {
      load_rows<kCluster, kShared>(&p.map[0], to, row, step * kTileK, kPair == Pair::same ? 0 : t.batch, barrier, rank);
    }
  }

 protected:
  // kDivide: each of the cluster's blocks loads a part of these rows.
  template <int kCluster, bool kDivide>
  static __device__ __forceinline__ void load_rows(const CUtensorMap* map, char* to, uint32_t row, uint32_t first_k,
                                                   uint32_t batch, uint64_t* barrier, uint32_t rank) {
    const int k = int(first_k), z = int(batch);
    if constexpr (kMajor == Major::k) {
      constexpr uint32_t kBox = uint32_t(box_rows<kCluster>());
      const uint32_t mine = kDivide && kCluster > 1 ? rank * kBox : 0;
      copy<kCluster>(to + mine * 128, map, k, int(row + mine), z, barrier);
    } else {
#pragma unroll
      for (uint32_t panel = 0; panel < kMapRows / 64; ++panel)
        if (!kDivide || panel % kCluster == rank || kCluster == 1)
          copy<kCluster>(to + panel * kPanelBytes, map, int(row + 64 * panel), k, z, barrier);
    }
  }
  template <int kCluster>
  static __device__ __forceinline__ void copy(char* to, const CUtensorMap* map, int x, int y, int z,
                                              uint64_t* barrier) {
    if constexpr (kShared && kCluster > 1)
      ptx::tensor_load_3d_multicast(to, map, x, y, z, barrier, ptx::multicast_mask(0, kCluster));
    else
      ptx::tensor_load_3d(to, map, x, y, z, barrier);
  }
};

template <class T, int kRows, bool kShared> struct GroupedRows : Operand<T, Major::mn, kRows, kShared> {
  using Base = Operand<T, Major::mn, kRows, kShared>;
  struct Params : Base::Params {
    GroupOffsets at;
  };
  template <int kCluster> static Params params(const char* name, const Tensor& matrix, const GroupOffsets& at) {
    return {Base::template params<kCluster>(name, matrix), at};
  }
  template <int kCluster>
  static __device__ __forceinline__ void load(const Params& p, char* to, const TileAt& t, uint32_t row, uint32_t step,
                                              uint64_t* barrier, uint32_t rank) {
    Base::template load_rows<kCluster, kShared>(&p.map[0], to, row, p.at.begin(t.batch) + step * kTileK, 0, barrier,
                                                rank);
  }
};

}  // namespace ingot::gemm
