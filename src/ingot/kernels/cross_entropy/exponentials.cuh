#pragma once
// Exponentials of logits in the epilogue of the product (gpu/gemm).
#include "ingot/gpu/gemm/config.h"
#include "ingot/gpu/gemm/epilogue.cuh"
#include "ingot/gpu/gemm/schedule.h"
#include "ingot/kernels/cross_entropy/exponentials.h"
#include "ingot/kernels/cross_entropy/softcap.cuh"

namespace ingot::cuda::exponentials_detail {

constexpr gemm::Tile kTile = gemm::kPairs128;
static_assert(kTile.n == kExponentialColumns, "a tile's rows are the parts of a row");
constexpr int kSums = kTile.n / 2;  // sums of a thread in 64 rows of a tile: half of each of two rows

template <class Core, class T> class Exponentiate {
 public:
  struct Params {
    typename Core::Target e;
    float2* parts = nullptr;  // (rows, tiles): high, sum
    float* at_target = nullptr;
    const int32_t* targets = nullptr;
    uint32_t rows = 0, columns = 0, tiles = 0;
    float softcap = 0;
    bool keeps = false;
  };
  using Shared = gemm::Staging<2>;

  __device__ __forceinline__ Exponentiate(const Params& p, Shared& s, uint32_t warp) : p_(p), out_(s.of[warp]) {}

  __device__ __forceinline__ void operator()(float (&d)[kSums], const gemm::WarpAt& at) {
    const uint32_t lane = threadIdx.x % 32, row = at.row + lane / 4, left = p_.columns - at.column;
    // Requested before any computation.
    const uint32_t target[2] = {target_of(row), target_of(row + 8)};
    const float nothing = -__int_as_float(0x7f800000);
    if (p_.softcap > 0) {
      const Cap cap(p_.softcap);
#pragma unroll
      for (int i = 0; i < kSums; ++i) d[i] = cap.capped(d[i]);
    }
    if (left < uint32_t(kTile.n))
#pragma unroll
      for (int i = 0; i < kSums; ++i)
        if (uint32_t(i) / 4 * 8 >= left) d[i] = nothing;  // columns are whole eights
    float high[2] = {nothing, nothing}, sum[2] = {};
#pragma unroll
    for (int i = 0; i < kSums; ++i) high[i / 2 % 2] = ptx::max_nan(high[i / 2 % 2], d[i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      leave_target(d, half, row + 8 * half, target[half] - at.column);
#pragma unroll
      for (int step = 1; step <= 2; step *= 2)
        high[half] = ptx::max_nan(high[half], __shfl_xor_sync(~0u, high[half], step));
    }
    // where all logits of a row are -infinity
    const float base[2] = {fmaxf(high[0], -1e38f) * kLog2e, fmaxf(high[1], -1e38f) * kLog2e};
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      d[i] = ptx::exp2_approx(fmaf(d[i], kLog2e, -base[i / 2 % 2]));
      sum[i / 2 % 2] += d[i];
    }
    if (p_.keeps) keep(d, at);
      // This comes last, because a panel's fence waits for earlier stores to memory.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 1; step <= 2; step *= 2) sum[half] += __shfl_xor_sync(~0u, sum[half], step);
      const uint32_t r = row + 8 * half;
      if (lane % 4 == 0 && r < p_.rows)
        p_.parts[uint64_t(r) * p_.tiles + at.column / kTile.n] = make_float2(high[half], sum[half]);
    }
  }
  __device__ __forceinline__ void end() { out_.end(); }

 private:
  __device__ __forceinline__ uint32_t target_of(uint32_t row) const {
    return row < p_.rows ? uint32_t(p_.targets[row]) : ~0u;
  }
  __device__ __forceinline__ void keep(const float (&d)[kSums], const gemm::WarpAt& at) {
#pragma unroll
    for (int panel = 0; panel < 2; ++panel) {
      const uint32_t column = at.column + panel * 64;
      if (column >= p_.columns) break;
      uint32_t pairs[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) pairs[i] = ptx::pack(T{}, d[panel * 32 + 2 * i], d[panel * 32 + 2 * i + 1]);
      out_.write(pairs);
      out_.send(&p_.e, column, at.row, 0);
    }
  }
  // Stores c at the row's target from the thread that holds this c, if the tile contains the target. `at`: the target
  // minus the tile's first column.
  __device__ __forceinline__ void leave_target(const float (&d)[kSums], int half, uint32_t row, uint32_t at) const {
    const uint32_t mine = threadIdx.x % 4;
    if (at >= uint32_t(kTile.n) || at % 8 / 2 != mine || row >= p_.rows) return;
    float c = 0;
#pragma unroll
    for (uint32_t i = 0; i < kSums / 2; ++i)
      if (i / 2 * 8 + i % 2 == at - 2 * mine) c = d[i / 2 * 4 + 2 * half + i % 2];
    p_.at_target[row] = c;
  }
  const Params& p_;
  typename Core::template PanelStore<2> out_;
};

template <class Core, class T> struct Product {
  using Type = T;
  static constexpr gemm::Tile kTile = Core::tile(exponentials_detail::kTile);
  using A = typename Core::template Operand<T, ptx::Major::k, gemm::kTileM, false>;
  using B = typename Core::template Operand<T, ptx::Major::k, kTile.n, true>;
  using Schedule = gemm::Grid;
  using Epilogue = Exponentiate<Core, T>;
};

}  // namespace ingot::cuda::exponentials_detail

namespace ingot::cuda {

template <class Core, class T>
void launch_exponentials(const Tensor& x, const Tensor& w, const Tensor& targets, double softcap,
                         const Exponentials& out, Stream stream) {
  using namespace exponentials_detail;
  using Op = Product<Core, T>;
  const char* const name = "linear_cross_entropy";
  const gemm::Grid schedule = gemm::Grid::of({x.rows(), w.rows(), x.cols()}, Op::kTile);
  typename Op::Epilogue::Params to{.parts = static_cast<float2*>(out.parts.data),
                                   .at_target = out.at_target.ptr<float>(),
                                   .targets = targets.ptr<int32_t>(),
                                   .rows = uint32_t(x.rows()),
                                   .columns = uint32_t(w.rows()),
                                   .tiles = uint32_t(out.parts.size(1)),
                                   .softcap = float(softcap),
                                   .keeps = bool(out.e)};
  if (out.e) to.e = Core::template target<T>(name, out.e);
  Core::template launch<Op>(name,
                            {.a = Op::A::template params<Op::kTile.cluster>(name, x),
                             .b = Op::B::template params<Op::kTile.cluster>(name, w),
                             .schedule = schedule,
                             .epilogue = to},
                            x.device.index, stream, schedule.tiles);
}

}  // namespace ingot::cuda
