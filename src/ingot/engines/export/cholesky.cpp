#include "ingot/engines/export/cholesky.h"

#include <algorithm>
#include <cmath>

#include "ingot/core/cpu/thread_pool.h"

namespace ingot {
namespace {

// Eight sums let the compiler use vectors without a change in the order of additions.
double dot(const double* x, const double* y, int64_t n) {
  double sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int lane = 0; lane < 8; ++lane) sums[lane] += x[i + lane] * y[i + lane];
  double tail = 0;
  for (; i < n; ++i) tail += x[i] * y[i];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7])) + tail;
}

}  // namespace

int64_t cholesky(double* a, int64_t n) {
  constexpr int64_t panel = 64, grain = 16;
  for (int64_t begin = 0; begin < n; begin += panel) {
    const int64_t end = std::min(begin + panel, n);
    for (int64_t i = begin; i < end; ++i) {
      double* row = a + i * n;
      for (int64_t j = begin; j < i; ++j) row[j] = (row[j] - dot(row, a + j * n, j)) / a[j * n + j];
      const double pivot = row[i] - dot(row, row, i);
      if (!(pivot > 0) || !std::isfinite(pivot)) return i;
      row[i] = std::sqrt(pivot);
    }
    parallel_for(n - end, grain, [&](int64_t first, int64_t last) {
      for (int64_t i = end + first; i < end + last; ++i) {
        double* row = a + i * n;
        for (int64_t j = begin; j < end; ++j) row[j] = (row[j] - dot(row, a + j * n, j)) / a[j * n + j];
      }
    });
  }
  return n;
}

}  // namespace ingot
