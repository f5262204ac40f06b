#pragma once
// The softcap of logits in kernels.
#include "ingot/gpu/ptx/math.cuh"

namespace ingot::cuda {

constexpr float kLog2e = 1.44269504088896f;

// softcap * tanh(l / softcap) by two special functions, with an error of 2^-21 of the cap at most; l itself without a
// cap.
struct Cap {
  float cap, rate, inverse;  // rate: 2 log2(e) / cap
  __device__ explicit Cap(float softcap)
      : cap(softcap), rate(softcap > 0 ? 2 * kLog2e / softcap : 0), inverse(softcap > 0 ? 1 / softcap : 0) {}
  __device__ float capped(float l) const {  // where there is a cap
    return cap - 2 * cap * ptx::reciprocal_approx(1 + ptx::exp2_approx(l * rate));
  }
  __device__ float operator()(float l) const { return cap == 0 ? l : capped(l); }
  __device__ float slope(float capped) const {
    if (cap == 0) return 1;
    const float u = capped * inverse;
    return 1 - u * u;
  }
};

}  // namespace ingot::cuda
