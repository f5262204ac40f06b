#pragma once
// Cholesky's factor in fp64, on all threads, with sums in an order given by n alone.
//
// Written here because LAPACK may divide its sums by the number of threads, and an artifact must have the same bits on
// any number of threads (gptq.test.cpp). The factorisation is not the slow part of an export: GPTQ of all of golf's
// matrices, including the factorisation, takes 2.6 s, and 5.0 s with the Hessians, of the 15 s allowed
// (docs/artifact.md).
#include <cstdint>

namespace ingot {

// a [n, n], row-major, read on and below the diagonal: this triangle becomes L, with a = L L^T. Returns n, or the first
// row whose pivot is not a positive number: then a is not positive definite, and its content is useless.
int64_t cholesky(double* a, int64_t n);

}  // namespace ingot
