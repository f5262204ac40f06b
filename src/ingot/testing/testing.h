#pragma once
// Shared by numeric tests: owned tensors with guard zones and poison, seeded inputs at realistic scale, comparison with
// a reference under a derived tolerance, and finite differences. Only tests and benches include this.
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "ingot/core/rng.h"
#include "ingot/core/tensor.h"

namespace ingot::testing {

// Memory for a tensor, with 1 KiB of guard bytes on both sides. A new buffer is poisoned: every float is a NaN.
class Buffer {
 public:
  Buffer(DType dtype, Shape shape);
  // Rows spread `row_stride` elements apart; the gaps are guards too.
  Buffer(DType dtype, Shape shape, int64_t row_stride);
  Tensor tensor() const { return tensor_; }
  operator Tensor() const { return tensor_; }
  void poison();
  bool guards_intact() const;

 private:
  std::vector<uint8_t> memory_, untouched_;
  Tensor tensor_;
};

// A contiguous f64 copy of a tensor's elements, in index order; and back (rounding to the tensor's dtype).
std::vector<double> values(const Tensor& t);
void assign(const Tensor& t, const std::vector<double>& v);

// Normal numbers of standard deviation `scale`, rounded to the tensor's dtype. The same seed gives the same numbers.
void fill_normal(const Tensor& t, uint64_t seed, double scale = 1, double mean = 0);
void fill_ids(const Tensor& t, uint64_t seed, int64_t below);  // i32 in [0, below)

// Unit roundoff: half an ulp of 1.
double roundoff(DType t);

struct Comparison {
  bool ok = false;
  double worst = 0;     // largest |got - want| / allowed
  std::string message;  // index, both values, allowance; empty when ok
};
// Every element must be finite where want is, equal where want is not, and within absolute + relative * |want|.
Comparison compare(const Tensor& got, const std::vector<double>& want, double absolute, double relative);

// Checks d(sum of `weights` * outputs)/d(input) against central differences in fp64, along `directions` random
// directions.
//   f      recomputes the outputs from the input's present content and returns sum(weights * outputs)
//   input  the f64 tensor to vary
//   grad   its analytic gradient, of the same shape
// Returns the worst relative error; the step is chosen as cbrt(eps) of the direction's size.
double gradient_error(const std::function<double()>& f, const Tensor& input, const Tensor& grad, uint64_t seed,
                      int directions = 3);
// Runs `op` on `args` with each operand in turn marked as memory of a GPU. Empty if each run throws an Error about the
// device; else the index of the first operand with an unchecked device, whose memory a kernel would have read as host
// memory.
template <class Args, class Op>
std::string device_not_checked(const Args& args, std::initializer_list<Tensor Args::*> operands, Op&& op) {
  int place = 0;
  for (Tensor Args::*operand : operands) {
    Args a = args;
    (a.*operand).device = {Device::cuda, 0};
    try {
      op(a, Stream{});
      return ingot::detail::concat("operand ", place, ": no error");
    } catch (const Error& e) {
      if (std::string_view(e.what()).find("cuda:0") == std::string_view::npos)
        return ingot::detail::concat("operand ", place, ": ", e.what());
    }
    ++place;
  }
  return {};
}
// sum of weights * t: the scalar whose gradient with respect to t is `weights`.
double dot(const Tensor& t, const Tensor& weights);

}  // namespace ingot::testing
