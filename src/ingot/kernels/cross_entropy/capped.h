#pragma once
// The product's output for softcapped logits, where the cap is low enough that exp(c) can be computed without
// subtracting the maximum (bf16 has fp32's exponents). For each row of a chunk the product writes:
//   u = exp(c) (1 - (c / cap)^2)    the gradient of the row's logits, except for a factor and for the target's term
//   sums of exp(c)                  in fp32, one sum for each tile of kCappedColumns columns
// and c at the target. The gradient of row t is factor[t] * u[t] and is never written: dw is a product of u and factor
// * x, and rows of u w are multiplied by the factor. Only the target's u is replaced once the sum is known.
#include "ingot/kernels/cross_entropy/cross_entropy.h"

namespace ingot::cuda {

constexpr int64_t kCappedColumns = 128;

// The largest cap, for which the factors of rows and their products stay within fp32 for all logits; and the largest
// z_loss, for which 1 + 2 z_loss lse stays well above 0.
constexpr double kMostCap = 40, kMostCappedZ = 1. / 160;

struct Capped {
  Tensor u;          // (T, V) bf16, V in whole eights, rows of whole 16 bytes; left out if no gradient is wanted
  Tensor sums;       // (T, tiles of V) f32
  Tensor at_target;  // (T) f32; not written where the target is none of the columns
  Tensor factor;     // (T) f32: written by finish_capped
  Tensor x;          // (T, C) bf16, C in whole eights: factor * x, written by finish_capped, or none
  int64_t vocab = 0;
};

// x (T, C), w (V, C) bf16. Writes u, sums and at_target. Core: gemm::HopperCore, PortableCore.
template <class Core>
void launch_capped(const Tensor& x, const Tensor& w, const Tensor& targets, double softcap, const Capped& out,
                   Stream stream);
// Writes losses, factors, the target's u, and factor * x. Rows of ignored targets become zeros.
void finish_capped(const Capped& in, const Tensor& x, const CrossEntropy& a, Stream stream);
// y[t] = factor[t] * sums[t]      (T, C) of bf16 and f32, C in whole eights
void multiply_rows(const Tensor& factor, const Tensor& sums, const Tensor& y, Stream stream);

}  // namespace ingot::cuda
