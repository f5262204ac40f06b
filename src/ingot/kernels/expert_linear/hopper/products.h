#pragma once
// The products of experts on Hopper's tensor cores, on the core of matrix products (gpu/gemm). 16-bit operands; every
// sum is formed in fp32 by one thread in one order, so results repeat bit for bit.
#include "ingot/gpu/gemm/config.h"
#include "ingot/kernels/expert_linear/expert_linear.h"

namespace ingot::cuda::expert_hopper {

// The tile of products over rows of x or dy. Some rows of a tile may belong to another expert, and the epilogue does
// not store them. It needs registers for this, which a wider tile would use for its sums.
constexpr gemm::Tile kRowsTile = gemm::kTurns128;
// The tiles of the gradients of the matrices.
constexpr gemm::Tile kMatrixTiles[] = {gemm::kTurns128, gemm::kTurns192};
inline int pick_matrix_tile(int64_t n, int64_t k, int64_t experts, int64_t sms) {
  return gemm::pick_tile({n, k, 0, experts}, kMatrixTiles, sms);
}

// Requires operands that are not empty and whose rows begin at multiples of 16 bytes, and results whose rows are whole
// multiples of 16 bytes (gpu/gemm/operands.h).
template <class T> void forward(const ExpertLinear& a, Stream stream);
template <class T> void backward_dx(const ExpertLinearBackward& a, Stream stream);
template <class T> void backward_dw(const ExpertLinearBackward& a, Stream stream);

}  // namespace ingot::cuda::expert_hopper
