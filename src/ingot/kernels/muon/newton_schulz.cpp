#include "ingot/kernels/muon/newton_schulz.h"

#include <algorithm>
#include <cmath>

namespace ingot {
namespace {

// The largest |polynomial| on [0, most], where the derivative has no zeros but the given ones.
template <class Polynomial>
double largest(Polynomial&& polynomial, double most, std::initializer_list<double> extremes) {
  double found = std::max(std::fabs(polynomial(0.0)), std::fabs(polynomial(most)));
  for (double x : extremes)
    if (x > 0 && x < most) found = std::max(found, std::fabs(polynomial(x)));
  return found;
}

}  // namespace

// Let l = s s be an eigenvalue of A. The eigenvalue of Q is q(l) = a + b l + c l l, with an extremum at l = -b / 2 c.
// The next singular value is s q(l), with extrema where a + 3 b l + 5 c l l = 0. A zero that does not exist is computed
// as NaN, which lies in no interval.
IterationRange iteration_range(const Coefficients& co) {
  const auto q = [&](double l) { return co.a + co.b * l + co.c * l * l; };
  const double root = std::sqrt(9 * co.b * co.b - 20 * co.a * co.c), straight = -co.a / (3 * co.b);
  const double low = (-3 * co.b - root) / (10 * co.c), high = (-3 * co.b + root) / (10 * co.c);
  IterationRange range;
  double value = 1;
  for (int step = 0; step < co.steps && std::isfinite(value); ++step) {
    range.factor = std::max(range.factor, largest(q, value * value, {-co.b / (2 * co.c)}));
    value = std::sqrt(largest([&](double l) { return l * q(l) * q(l); }, value * value, {low, high, straight}));
    range.value = std::max(range.value, value);
  }
  return range;
}

bool iterates_on_square(int64_t rows, int64_t cols) {
  constexpr int64_t kLong = 2;
  return std::max(rows, cols) >= kLong * std::min(rows, cols);
}

std::vector<int> parts_on_square(const Coefficients& co, double most_growth) {
  const double factor = iteration_range(co).factor;
  int most = 1;
  for (double growth = factor * factor; most < co.steps && growth <= most_growth; growth *= factor) ++most;
  std::vector<int> parts;
  for (int left = co.steps; left > 0; left -= parts.back()) parts.push_back(left % most != 0 ? left % most : most);
  return parts;
}

namespace cuda {

double iteration_scale(const char* op, const Coefficients& co) {
  constexpr double kMost = 32768;  // half of f16's largest number, for the roundings
  const auto [value, factor] = iteration_range(co);
  // X, A, b A + c A A and Q A times the scale.
  const double square = value * value;
  const double numbers =
      std::max({value, square, std::fabs(co.b) * square + std::fabs(co.c) * square * square, factor * square});
  INGOT_CHECK(numbers <= kMost / 16, op, ": found coefficients ", co.a, ", ", co.b, ", ", co.c,
              " with which a singular value of 1 may become ", value, " in ", co.steps,
              " steps, expected coefficients that keep singular values small");
  return std::exp2(std::floor(std::log2(kMost / numbers)));
}

}  // namespace cuda
}  // namespace ingot
