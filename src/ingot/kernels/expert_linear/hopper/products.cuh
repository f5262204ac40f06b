#pragma once
// Products over rows, y = x w[e]^T and dx = dy w[e]: a tile has rows of one expert only, and matrix e is the second
// operand in the order in which it lies in memory. Sums over rows, dw[e] = dy^T x: both operands are MN-major, the rows
// of expert e are K, and the rows of the next expert in the last stage are set to zero.
#include "ingot/gpu/gemm/core.cuh"
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/fence.cuh"
#include "ingot/gpu/tile/vec.cuh"
#include "ingot/kernels/expert_linear/hopper/products.h"

namespace ingot::cuda::expert_hopper {

using gemm::GroupOffsets;
using gemm::Major;
using gemm::Tile;
using gemm::TileAt;

inline GroupOffsets offsets_of(const Tensor& offsets, int64_t rows) {
  return {offsets.ptr<int32_t>(), uint32_t(offsets.size(0) - 1), uint32_t(rows)};
}

// Stores the sums of one expert's rows, with the expert's bias. A tensor copy stores sixteen rows at a time. If the
// expert ends within these rows, each thread instead stores its own elements, because the next rows belong to another
// expert.
template <class T> class StoreRows {
 public:
  struct Params {
    CUtensorMap map;
    T* c;
    int64_t stride;
    const T* bias;  // (groups, columns) or null
    uint32_t groups, columns;
  };
  using Shared = gemm::Staging<>;

  static Params params(const char* name, const Tensor& c, const Tensor& bias, int64_t groups) {
    return {gemm::store_map<T>(name, c),    c.ptr<T>(),       c.row_stride(),
            bias ? bias.ptr<T>() : nullptr, uint32_t(groups), uint32_t(c.cols())};
  }
  __device__ __forceinline__ StoreRows(const Params& p, Shared& s, uint32_t warp) : p_(p), out_(s.of[warp]) {}

  template <int kSums> __device__ __forceinline__ void operator()(float (&d)[kSums], const gemm::WarpAt& at) {
    if (at.row >= at.row_end) return;
    const bool whole = at.row + gemm::kWarpRows <= at.row_end;
    const uint32_t lane = threadIdx.x % 32;
#pragma unroll
    for (int panel = 0; panel < kSums / 32; ++panel) {
      const uint32_t column = at.column + panel * 64;
      if (column >= p_.columns) break;
      float v[32];
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
        const float2 b = bias(at.batch, column + i / 4 * 8 + lane % 4 * 2);
        v[i] = d[panel * 32 + i] + b.x, v[i + 1] = d[panel * 32 + i + 1] + b.y;
      }
      uint32_t pairs[16];
      gemm::pack<T>(v, pairs);
      if (whole) {
        out_.write(pairs);
        out_.send(&p_.map, column, at.row, 0);
        continue;
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const uint32_t row = at.row + lane / 4 + i % 2 * 8, first = column + i / 2 * 8 + lane % 4 * 2;
        if (row < at.row_end && first < p_.columns)
          *reinterpret_cast<uint32_t*>(p_.c + int64_t(row) * p_.stride + first) = pairs[i];
      }
    }
  }
  __device__ __forceinline__ void end() { out_.end(); }

 private:
  // The rows behind the last expert's have no bias.
  __device__ __forceinline__ float2 bias(uint32_t expert, uint32_t column) const {
    if (p_.bias == nullptr || expert >= p_.groups || column >= p_.columns) return {0, 0};
    const T* const b = p_.bias + size_t(expert) * p_.columns + column;
    return {tile::to_float(b[0]), tile::to_float(b[1])};
  }
  const Params& p_;
  gemm::WarpStore<> out_;
};

// kMajorW: the matrix of an expert is (rows of B, K) or (K, rows of B). All experts share one matrix of rows, x or dy.
template <class T, Major kMajorW> struct RowProduct {
  using Type = T;
  static constexpr Tile kTile = kRowsTile;
  using A = gemm::Operand<T, Major::k, gemm::kTileM, false, gemm::Pair::same>;
  using B = gemm::Operand<T, kMajorW, kTile.n, true>;
  using Schedule = gemm::Grouped;
  using Epilogue = StoreRows<T>;
};

template <class T, Major kMajorW>
void launch_rows(const char* name, const Tensor& x, const Tensor& w, const Tensor& bias, const Tensor& y,
                 const Tensor& offsets, Stream stream) {
  using Op = RowProduct<T, kMajorW>;
  constexpr Tile kTile = Op::kTile;
  const gemm::Grouped schedule = gemm::Grouped::of(offsets_of(offsets, x.rows()), y.cols(), x.cols(), kTile);
  gemm::launch<Op>(name,
                   {.a = Op::A::template params<kTile.cluster>(name, x),
                    .b = Op::B::template params<kTile.cluster>(name, w),
                    .schedule = schedule,
                    .epilogue = Op::Epilogue::params(name, y, bias, w.size(0))},
                   x.device.index, stream, schedule.most_tiles());
}

template <class T, Tile kTileOf> struct RowSums {
  using Type = T;
  static constexpr Tile kTile = kTileOf;
  using A = gemm::GroupedRows<T, gemm::kTileM, false>;
  using B = gemm::GroupedRows<T, kTile.n, true>;
  using Schedule = gemm::GroupedSums;
  using Epilogue = gemm::Store<T>;

  // Sets the rows of the next expert in the last stage to zero, in both operands, because they may hold infinities. A
  // row of K is 128 bytes of each panel. The warpgroup whose turn the tile is reads the whole stage alone.
  static __device__ __forceinline__ void trim(const gemm::Arguments<RowSums>& p, const TileAt& t, uint32_t step,
                                              uint32_t a, uint32_t b) {
    static_assert(kTile.team == gemm::Team::ping_pong, "one warpgroup multiplies a stage");
    if (step + 1 < t.k_steps) return;
    const uint32_t rows = p.schedule.rows_of_stage(t, step);
    if (rows == gemm::kTileK) return;
    constexpr uint32_t kZeros[4] = {};
    for (uint32_t at = rows * 128 + threadIdx.x % 128 * 16; at < gemm::kPanelBytes; at += 128 * 16) {
#pragma unroll
      for (uint32_t panel = 0; panel < A::kBytes; panel += gemm::kPanelBytes) ptx::store_shared(a + panel + at, kZeros);
#pragma unroll
      for (uint32_t panel = 0; panel < B::kBytes; panel += gemm::kPanelBytes) ptx::store_shared(b + panel + at, kZeros);
    }
    ptx::fence_proxy_async_shared();  // the products read the stage through the asynchronous proxy
    ptx::barrier_sync(threadIdx.x / 128 + kFirstBarrier, 128);
  }

 private:
  // The warpgroups that multiply are the second and the third; turns use barriers 1 and 2 (gemm/pipeline.cuh).
  static constexpr uint32_t kFirstBarrier = 2;
};

template <class T, Tile kTile> void launch_sums(const char* name, const ExpertLinearBackward& a, Stream stream) {
  using Op = RowSums<T, kTile>;
  const GroupOffsets at = offsets_of(a.offsets, a.dy.rows());
  const gemm::GroupedSums schedule = gemm::GroupedSums::of(at, a.dw.size(1), a.dw.size(2), !a.overwrite, kTile);
  gemm::launch<Op>(name,
                   {.a = Op::A::template params<kTile.cluster>(name, a.dy, at),
                    .b = Op::B::template params<kTile.cluster>(name, a.x, at),
                    .schedule = schedule,
                    .epilogue = Op::Epilogue::params(name, a.dw, !a.overwrite)},
                   a.dy.device.index, stream, schedule.grid.tiles);
}

template <class T> void forward(const ExpertLinear& a, Stream stream) {
  launch_rows<T, Major::k>("expert_linear", a.x, a.w, a.b, a.y, a.offsets, stream);
}
template <class T> void backward_dx(const ExpertLinearBackward& a, Stream stream) {
  launch_rows<T, Major::mn>("expert_linear_backward: dx", a.dy, a.w, {}, a.dx, a.offsets, stream);
}
template <class T> void backward_dw(const ExpertLinearBackward& a, Stream stream) {
  const int64_t sms = gpu::sm_count(a.dy.device.index);
  if (pick_matrix_tile(a.dw.size(1), a.dw.size(2), a.dw.size(0), sms) == 0)
    return launch_sums<T, kMatrixTiles[0]>("expert_linear_backward: dw", a, stream);
  launch_sums<T, kMatrixTiles[1]>("expert_linear_backward: dw", a, stream);
}

}  // namespace ingot::cuda::expert_hopper
