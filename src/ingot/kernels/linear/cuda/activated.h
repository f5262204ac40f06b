#pragma once
// linear with its activation, and the input gradient with the activation's slopes, in the products' epilogues: the
// values before the activation are written to memory only where the caller keeps them.
#include "ingot/gpu/gemm/config.h"
#include "ingot/kernels/linear/linear.h"

namespace ingot::cuda {

// The activations with fused kernels; all further activations are launches of their own.
using FusedActivations = ActivationList<LeakyReluSquared, ReluSquared, Gelu, GeluTanh>;
constexpr gemm::Tile kActivatedTile = gemm::kPairs128;

inline bool is_fused_activation(Act act) {
  bool known = false;
  for_each_activation([&](auto f) { known |= act_of<decltype(f)> == act; }, FusedActivations{});
  return known;
}
// The fused activation saves a whole pass over the result, which pays off even where tiles leave a part of the GPU
// idle.
// `tile`: of the form of the core.
inline bool activated_is_faster(const gemm::Problem& p, const gemm::Tile& tile, int64_t sms) {
  return p.k >= 64 && gemm::efficiency(p, tile, sms) >= 0.7;
}

// Core: gemm::HopperCore, PortableCore. T: bf16 or f16. Operands have rank 2, aligned rows and whole eights of columns.
template <class Core, class T> void launch_activated(const Linear& a, Stream stream);
// dx = (dy W) * f'(...), from pre, or (bf16) from x and signs.
template <class Core, class T> void launch_sloped(const LinearBackward& a, Stream stream);

}  // namespace ingot::cuda
