#pragma once
// Exponentials of softcapped logits times the cap's slopes, in the epilogue of the product (gpu/gemm).
#include "ingot/gpu/gemm/config.h"
#include "ingot/gpu/gemm/epilogue.cuh"
#include "ingot/gpu/gemm/schedule.h"
#include "ingot/kernels/cross_entropy/capped.h"
#include "ingot/kernels/cross_entropy/softcap.cuh"

namespace ingot::cuda::capped_detail {

constexpr gemm::Tile kTile = gemm::kPairs128;
static_assert(kTile.n == kCappedColumns, "a tile's rows are the parts of a row");
constexpr int kSums = kTile.n / 2;  // sums of a thread in 64 rows of a tile: half of each of two rows

template <class Core> class Weigh {
 public:
  struct Params {
    typename Core::Target u;
    float* sums = nullptr;  // (rows, tiles)
    float* at_target = nullptr;
    const int32_t* targets = nullptr;
    uint32_t rows = 0, columns = 0, tiles = 0;
    float softcap = 0;
    bool keeps = false;
  };
  using Shared = gemm::Staging<2>;

  __device__ __forceinline__ Weigh(const Params& p, Shared& s, uint32_t warp) : p_(p), out_(s.of[warp]) {}

  __device__ __forceinline__ void operator()(float (&d)[kSums], const gemm::WarpAt& at) {
    const uint32_t lane = threadIdx.x % 32, row = at.row + lane / 4, left = p_.columns - at.column;
    const Cap cap(p_.softcap);
    // Requested before any computation.
    const uint32_t target[2] = {target_of(row), target_of(row + 8)};
#pragma unroll
    for (int half = 0; half < 2; ++half) leave_target(cap, d, half, row + 8 * half, target[half] - at.column);
    float sum[2] = {};
    if (left >= uint32_t(kTile.n))
      weigh<false>(cap, d, sum, left);
    else
      weigh<true>(cap, d, sum, left);
    if (p_.keeps) keep(d, at);
      // This comes last, because a panel's fence waits for earlier stores to memory.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 1; step <= 2; step *= 2) sum[half] += __shfl_xor_sync(~0u, sum[half], step);
      const uint32_t r = row + 8 * half;
      if (lane % 4 == 0 && r < p_.rows) p_.sums[uint64_t(r) * p_.tiles + at.column / kTile.n] = 0.25f * sum[half];
    }
  }
  __device__ __forceinline__ void end() { out_.end(); }

 private:
  __device__ __forceinline__ uint32_t target_of(uint32_t row) const {
    return row < p_.rows ? uint32_t(p_.targets[row]) : ~0u;
  }
  // With r = 1 / (1 + exp(2 l / cap)): c = cap - 2 cap r, the slope is 4 r (1 - r). The exponentials are four times as
  // large, for the slope's sake.
  template <bool kEdge>
  __device__ __forceinline__ void weigh(const Cap& cap, float (&d)[kSums], float (&sum)[2], uint32_t left) const {
    const float a = -2 * kLog2e * p_.softcap, b = kLog2e * p_.softcap + 2;
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const float r = ptx::reciprocal_approx(1 + ptx::exp2_approx(d[i] * cap.rate));
      const float e = kEdge && uint32_t(i) / 4 * 8 >= left ? 0.f : ptx::exp2_approx(fmaf(r, a, b));
      sum[i / 2 % 2] += e;  // columns are whole eights
      d[i] = e * fmaf(-r, r, r);
    }
  }
  __device__ __forceinline__ void keep(const float (&d)[kSums], const gemm::WarpAt& at) {
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      const uint32_t column = at.column + panel * 64;
      if (column >= p_.columns) break;
      uint32_t pairs[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) pairs[i] = ptx::pack(bf16{}, d[panel * 32 + 2 * i], d[panel * 32 + 2 * i + 1]);
      out_.write(pairs);
      out_.send(&p_.u, column, at.row, 0);
    }
  }
  // Stores the logit at the row's target from the thread that holds this logit, if the tile contains the target. `at`:
  // the target minus the tile's first column.
  __device__ __forceinline__ void leave_target(const Cap& cap, const float (&d)[kSums], int half, uint32_t row,
                                               uint32_t at) const {
    const uint32_t mine = threadIdx.x % 4;
    if (at >= uint32_t(kTile.n) || at % 8 / 2 != mine || row >= p_.rows) return;
    float l = 0;
#pragma unroll
    for (uint32_t i = 0; i < kSums / 2; ++i)
      if (i / 2 * 8 + i % 2 == at - 2 * mine) l = d[i / 2 * 4 + 2 * half + i % 2];
    p_.at_target[row] = cap.capped(l);
  }
  const Params& p_;
  typename Core::template PanelStore<2> out_;
};

template <class Core> struct Product {
  using Type = bf16;
  static constexpr gemm::Tile kTile = Core::tile(capped_detail::kTile);
  using A = typename Core::template Operand<bf16, ptx::Major::k, gemm::kTileM, false>;
  using B = typename Core::template Operand<bf16, ptx::Major::k, kTile.n, true>;
  using Schedule = gemm::Grid;
  using Epilogue = Weigh<Core>;
};

}  // namespace ingot::cuda::capped_detail

namespace ingot::cuda {

template <class Core>
void launch_capped(const Tensor& x, const Tensor& w, const Tensor& targets, double softcap, const Capped& out,
                   Stream stream) {
  using namespace capped_detail;
  using Op = Product<Core>;
  const char* const name = "linear_cross_entropy";
  const gemm::Grid schedule = gemm::Grid::of({x.rows(), w.rows(), x.cols()}, Op::kTile);
  typename Op::Epilogue::Params to{.sums = out.sums.ptr<float>(),
                                   .at_target = out.at_target.ptr<float>(),
                                   .targets = targets.ptr<int32_t>(),
                                   .rows = uint32_t(x.rows()),
                                   .columns = uint32_t(w.rows()),
                                   .tiles = uint32_t(out.sums.size(1)),
                                   .softcap = float(softcap),
                                   .keeps = bool(out.u)};
  if (out.u) to.u = Core::template target<bf16>(name, out.u);
  Core::template launch<Op>(name,
                            {.a = Op::A::template params<Op::kTile.cluster>(name, x),
                             .b = Op::B::template params<Op::kTile.cluster>(name, w),
                             .schedule = schedule,
                             .epilogue = to},
                            x.device.index, stream, schedule.tiles);
}

}  // namespace ingot::cuda
