#pragma once
// Cholesky's factor in fp64, on all threads, with sums whose order depends on n alone.
#include <cstdint>

namespace ingot {

// a [n, n], row-major, read on and below the diagonal: becomes L there, with a = L L^T. Returns n, or the first row
// whose pivot is not a positive number: there a is not positive definite, and holds nothing of use.
int64_t cholesky(double* a, int64_t n);

}  // namespace ingot
