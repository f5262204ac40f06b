#pragma once
// The Newton-Schulz iteration X = Q X, Q = a I + b A + c A A, A = X X^T, in two forms:
//   on the matrix    A and Q X anew in each step
//   on the square    a part of several steps on A alone: A = Q A Q, P = Q P, and X = P X at the part's end
// Every Q is a polynomial in the part's first A, so all squares of a part commute and all their products are symmetric.
// The functions here choose the form and its parts, for a CPU and for a GPU.
#include <array>
#include <vector>

#include "ingot/core/tensor.h"

namespace ingot {

struct Coefficients {
  int steps;
  double a, b, c;
};

// The largest singular value of X during the steps, 1 or less before the first, and the largest eigenvalue of a Q.
struct IterationRange {
  double value = 1, factor = 0;
};
IterationRange iteration_range(const Coefficients& co);

// Whether matrices of this shape iterate on the square: the long side is at least twice the short side.
bool iterates_on_square(int64_t rows, int64_t cols);
// The number of square matrices that the iteration of such a matrix needs.
constexpr int kSquares = 5;
inline int squares_of(int64_t rows, int64_t cols) { return iterates_on_square(rows, cols) ? kSquares : 2; }

// The steps of each part on the square. P's eigenvalue of a singular value near zero grows by a in each step, P's
// roundings are of that size, and they multiply X's large singular values too. A part therefore ends before P exceeds
// `most_growth`. The first part takes the remainder: it begins with the smallest singular values.
std::vector<int> parts_on_square(const Coefficients& co, double most_growth);

namespace cuda {

// A bank of matrices for the three kinds of products on the core (gpu/gemm): x (B, R, C) and its partner of equal
// shape, and squares (B, S, S), S the shorter side, squares_of(R, C) of them. f16; each row is aligned to
// 16 bytes, last stride 1; the padding between the end of a row and the next 16 bytes is written too.
//
// x holds `scale` times X, because f16 loses bits of numbers below 2^-14: X's elements are near 1 / sqrt(R C), A's far
// smaller.
struct IterationBank {
  Tensor x, other;
  std::array<Tensor, kSquares> square;
  double scale = 1;
};
// The power of two for IterationBank::scale: no number of the iteration exceeds f16's range. An error where the
// coefficients let singular values grow too far.
double iteration_scale(const char* op, const Coefficients& co);

// Runs all steps and returns x or other, whichever holds the result. Only the tiles of squares on and below the
// diagonal are computed. Core: gemm::HopperCore, PortableCore.
template <class Core> Tensor launch_iteration(const IterationBank& n, const Coefficients& co, Stream stream);

}  // namespace cuda
}  // namespace ingot
