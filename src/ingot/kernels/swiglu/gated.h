#pragma once
// The three products of a gated unit on the core (gpu/gemm), each a single kernel. All operands have rank 2.
#include "ingot/gpu/gemm/config.h"
#include "ingot/kernels/swiglu/swiglu.h"

namespace ingot::cuda {

// Pairs of blocks: in a training step the data of preceding kernels fills L2, and pairs read less from L2.
constexpr gemm::Tile kGatedTile = gemm::kPairs128;

// Both products as a single product: the columns of a tile are gate and up of half as many columns of h.
constexpr gemm::Problem gated_problem(int64_t rows, int64_t hidden, int64_t channels) {
  return {rows, gemm::ceil_div(hidden, kGatedTile.n / 2) * kGatedTile.n, channels};
}
// With few tiles most of the GPU is idle; two products by cuBLASLt, which also divides K, followed by the gate are then
// faster.
// `tile`: of the form of the core.
inline bool gated_is_faster(int64_t rows, int64_t hidden, int64_t channels, const gemm::Tile& tile, int64_t sms) {
  const gemm::Problem p = gated_problem(rows, hidden, channels);
  return gemm::efficiency(p, tile, sms) * double(rows * hidden * 2) / double(p.m * p.n) >= 0.7;
}

// Up to this number of rows, reading the weights takes the whole time; Hopper then uses gated_few_rows.cu.
constexpr int64_t kFewGatedRows = 64;
void gated_few_rows(const GatedLinear& g, Stream stream);

// Core: gemm::HopperCore, PortableCore. T: bf16 or f16.
template <class Core, class T> void launch_gated(const GatedLinear& g, Stream stream);
// dx = dgate Wg + dup Wu; and dWg, dWu (+)= dgate^T x, dup^T x.
struct GatedGradients {
  Tensor dgate, dup, x, w_gate, w_up, dx, dw_gate, dw_up;
  bool transposed = false, overwrite = false;
};
template <class Core, class T> void launch_gated_dx(const GatedGradients& g, Stream stream);
template <class Core, class T> void launch_gated_dw(const GatedGradients& g, Stream stream);

}  // namespace ingot::cuda
