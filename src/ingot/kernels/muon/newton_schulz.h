#pragma once
// The three products of a Newton-Schulz step on the core (gpu/gemm), for a bank of matrices at once.
#include "ingot/core/tensor.h"

namespace ingot::cuda {

// x (B, R, C) and its partner of equal shape, square and polynomial (B, S, S), S the shorter side: 16-bit, each row
// aligned to 16 bytes, last stride 1; the padding between the end of a row and the next 16 bytes is written too.
struct IterationBank {
  Tensor x, other, square, polynomial;
  double a, b, c;
};
// other = a x + (b A + c A A) x, A = x x^T; for tall matrices the same with x on the left. Only the tiles of the
// squares on and below the diagonal are computed. Core:
// gemm::HopperCore, PortableCore. T: bf16.
template <class Core, class T> void launch_iteration(const IterationBank& n, Stream stream);

}  // namespace ingot::cuda
