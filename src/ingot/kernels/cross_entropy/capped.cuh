#pragma once
// Exponentials of softcapped logits times the cap's slopes, in the epilogue of the product (gpu/gemm).
#include "ingot/kernels/cross_entropy/capped.h"
#include "ingot/kernels/cross_entropy/logit_tile.cuh"

namespace ingot::cuda::capped_detail {

using logit_tile::kSums, logit_tile::kTile;
static_assert(kTile.n == kCappedColumns, "a tile's rows are the parts of a row");

template <class Core> class Weigh : public logit_tile::LogitTile<Core, bf16, float> {
  using Base = logit_tile::LogitTile<Core, bf16, float>;
  using Base::p_;

 public:
  using Base::Base;

  __device__ __forceinline__ void operator()(float (&d)[kSums], const gemm::WarpAt& at) {
    const uint32_t lane = threadIdx.x % 32, row = at.row + lane / 4, left = p_.columns - at.column;
    const Cap cap(p_.softcap);
    // Requested before any computation.
    const uint32_t target[2] = {this->target_of(row), this->target_of(row + 8)};
#pragma unroll
    for (int half = 0; half < 2; ++half)
      this->leave_target(d, half, row + 8 * half, target[half] - at.column,
                         [&](float logit) { return cap.capped(logit); });
    float sum[2] = {};
    if (left >= uint32_t(kTile.n))
      weigh<false>(cap, d, sum, left);
    else
      weigh<true>(cap, d, sum, left);
    if (p_.keeps) this->keep(d, at);
      // This comes last, because a panel's fence waits for earlier stores to memory.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int step = 1; step <= 2; step *= 2) sum[half] += __shfl_xor_sync(~0u, sum[half], step);
      const uint32_t r = row + 8 * half;
      if (lane % 4 == 0 && r < p_.rows) p_.parts[uint64_t(r) * p_.tiles + at.column / kTile.n] = 0.25f * sum[half];
    }
  }

 private:
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
};

}  // namespace ingot::cuda::capped_detail

namespace ingot::cuda {

template <class Core>
void launch_capped(const Tensor& x, const Tensor& w, const Tensor& targets, double softcap, const Capped& out,
                   Stream stream) {
  logit_tile::launch<Core, bf16, capped_detail::Weigh<Core>>(x, w, targets, softcap, out.u, out.sums, out.at_target,
                                                             stream);
}

}  // namespace ingot::cuda
