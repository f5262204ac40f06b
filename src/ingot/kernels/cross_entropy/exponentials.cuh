#pragma once
// Exponentials of logits in the epilogue of the product (gpu/gemm).
#include "ingot/kernels/cross_entropy/exponentials.h"
#include "ingot/kernels/cross_entropy/logit_tile.cuh"

namespace ingot::cuda::exponentials_detail {

using logit_tile::kSums, logit_tile::kTile;
static_assert(kTile.n == kExponentialColumns, "a tile's rows are the parts of a row");

// A part is (high, sum).
template <class Core, class T> class Exponentiate : public logit_tile::LogitTile<Core, T, float2> {
  using Base = logit_tile::LogitTile<Core, T, float2>;
  using Base::p_;

 public:
  using Base::Base;

  __device__ __forceinline__ void operator()(float (&d)[kSums], const gemm::WarpAt& at) {
    const uint32_t lane = threadIdx.x % 32, row = at.row + lane / 4, left = p_.columns - at.column;
    // Requested before any computation.
    const uint32_t target[2] = {this->target_of(row), this->target_of(row + 8)};
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
      this->leave_target(d, half, row + 8 * half, target[half] - at.column, [](float c) { return c; });
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
    if (p_.keeps) this->keep(d, at);
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
};

}  // namespace ingot::cuda::exponentials_detail

namespace ingot::cuda {

template <class Core, class T>
void launch_exponentials(const Tensor& x, const Tensor& w, const Tensor& targets, double softcap,
                         const Exponentials& out, Stream stream) {
  logit_tile::launch<Core, T, exponentials_detail::Exponentiate<Core, T>>(x, w, targets, softcap, out.e, out.parts,
                                                                          out.at_target, stream);
}

}  // namespace ingot::cuda
