#pragma once
// Cholesky's factor in fp64, on all threads, with sums whose order depends on n alone.
//
// Our own and not LAPACK's, whose sums may be cut by the number of threads: an artifact has the same bits on any number
// (gptq.test.cpp). It is not what an export waits for either: GPTQ of all of golf's matrices, of which this is a part,
// takes 2.6 s, with the Hessians 5.0, of 15 allowed (docs/artifact.md).
#include <cstdint>

namespace ingot {

// a [n, n], row-major, read on and below the diagonal: becomes L there, with a = L L^T. Returns n, or the first row
// whose pivot is not a positive number: there a is not positive definite, and holds nothing of use.
int64_t cholesky(double* a, int64_t n);

}  // namespace ingot
