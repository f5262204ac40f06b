#include "ingot/testing/testing.h"

#include <atomic>
#include <cmath>
#include <cstring>

namespace ingot::testing {
namespace {
constexpr int64_t kGuard = 1024;

// Calls use(linear index, element address) in index order.
template <class Use> void for_each_element(const Tensor& t, Use&& use) {
  int64_t index[kMaxRank] = {};
  const int64_t n = t.numel();
  for (int64_t i = 0; i < n; ++i) {
    int64_t offset = 0;
    for (int d = 0; d < t.rank(); ++d) offset += index[d] * t.stride[d];
    use(i, static_cast<char*>(t.data) + offset * size_of(t.dtype));
    for (int d = t.rank() - 1; d >= 0 && ++index[d] == t.shape.dim[d]; --d) index[d] = 0;
  }
}
double read(DType dtype, const char* at) {
  switch (dtype) {
    case DType::f64: {
      double v;
      std::memcpy(&v, at, 8);
      return v;
    }
    case DType::f32: {
      float v;
      std::memcpy(&v, at, 4);
      return v;
    }
    case DType::bf16: {
      bf16 v;
      std::memcpy(&v, at, 2);
      return float(v);
    }
    case DType::f16: {
      f16 v;
      std::memcpy(&v, at, 2);
      return float(v);
    }
    case DType::i64: {
      int64_t v;
      std::memcpy(&v, at, 8);
      return double(v);
    }
    case DType::i32: {
      int32_t v;
      std::memcpy(&v, at, 4);
      return v;
    }
    case DType::u32: {
      uint32_t v;
      std::memcpy(&v, at, 4);
      return v;
    }
    case DType::u16: {
      uint16_t v;
      std::memcpy(&v, at, 2);
      return v;
    }
    case DType::u8: return uint8_t(*at);
  }
  return 0;
}
void write(DType dtype, char* at, double x) {
  switch (dtype) {
    case DType::f64: std::memcpy(at, &x, 8); break;
    case DType::f32: {
      const float v = float(x);
      std::memcpy(at, &v, 4);
      break;
    }
    case DType::bf16: {
      const bf16 v{float(x)};
      std::memcpy(at, &v, 2);
      break;
    }
    case DType::f16: {
      const f16 v{float(x)};
      std::memcpy(at, &v, 2);
      break;
    }
    case DType::i64: {
      const int64_t v = int64_t(x);
      std::memcpy(at, &v, 8);
      break;
    }
    case DType::i32: {
      const int32_t v = int32_t(x);
      std::memcpy(at, &v, 4);
      break;
    }
    case DType::u32: {
      const uint32_t v = uint32_t(x);
      std::memcpy(at, &v, 4);
      break;
    }
    case DType::u16: {
      const uint16_t v = uint16_t(x);
      std::memcpy(at, &v, 2);
      break;
    }
    case DType::u8: *at = char(uint8_t(x)); break;
  }
}
}  // namespace

Buffer::Buffer(DType dtype, Shape shape) : Buffer(dtype, shape, shape.rank == 0 ? 0 : shape[-1]) {}

Buffer::Buffer(DType dtype, Shape shape, int64_t row_stride) {
  int64_t rows = 1;
  for (int i = 0; i + 1 < shape.rank; ++i) rows *= shape.dim[i];
  memory_.resize(size_t(2 * kGuard + rows * row_stride * size_of(dtype)) + 64);
  auto base = reinterpret_cast<uintptr_t>(memory_.data()) + kGuard;
  base = (base + 63) / 64 * 64;
  tensor_ = Tensor(reinterpret_cast<void*>(base), dtype, shape);
  int64_t step = row_stride;
  for (int i = shape.rank - 2; i >= 0; --i) {
    tensor_.stride[i] = step;
    step *= shape.dim[i];
  }
  poison();
}

// Elements are 0xff, a NaN in every floating type. Guards hold NaNs with another sign and payload than the guards of
// the buffer before: a kernel that copies one element too many then changes the guard of its output.
void Buffer::poison() {
  static std::atomic<unsigned> buffers{0};
  constexpr unsigned kPayloads = 14;  // 0xfff1 to 0xfffe and 0x7ff1 to 0x7ffe are NaNs, also as parts of wider types
  const unsigned buffer = buffers++;
  const uint8_t guard[2] = {uint8_t(0xf1 + buffer % kPayloads), uint8_t(buffer % 2 == 0 ? 0xff : 0x7f)};
  std::fill(memory_.begin(), memory_.end(), uint8_t(0xff));
  untouched_.resize(memory_.size());
  const auto begin = size_t(static_cast<uint8_t*>(tensor_.data) - memory_.data());
  for (size_t i = 0; i < memory_.size(); ++i) untouched_[i] = guard[(i - begin) % 2];
  for_each_element(tensor_, [&](int64_t, char* at) {
    const size_t i = size_t(reinterpret_cast<uint8_t*>(at) - memory_.data());
    for (int64_t k = 0; k < size_of(tensor_.dtype); ++k) untouched_[i + size_t(k)] = 0;
  });
  for (size_t i = 0; i < memory_.size(); ++i)
    if (untouched_[i] != 0) memory_[i] = untouched_[i];
}

bool Buffer::guards_intact() const {
  for (size_t i = 0; i < memory_.size(); ++i)
    if (untouched_[i] != 0 && memory_[i] != untouched_[i]) return false;
  return true;
}

std::vector<double> values(const Tensor& t) {
  std::vector<double> v(size_t(t.numel()));
  for_each_element(t, [&](int64_t i, char* at) { v[size_t(i)] = read(t.dtype, at); });
  return v;
}
void assign(const Tensor& t, const std::vector<double>& v) {
  INGOT_CHECK_EQ(int64_t(v.size()), t.numel(), "assign");
  for_each_element(t, [&](int64_t i, char* at) { write(t.dtype, at, v[size_t(i)]); });
}

void fill_normal(const Tensor& t, uint64_t seed, double scale, double mean) {
  const Rng rng(seed, Purpose::test);
  for_each_element(t, [&](int64_t i, char* at) { write(t.dtype, at, mean + scale * rng.normal(uint64_t(i))); });
}
void fill_ids(const Tensor& t, uint64_t seed, int64_t below) {
  const Rng rng(seed, Purpose::test, 1);
  for_each_element(t,
                   [&](int64_t i, char* at) { write(t.dtype, at, double(rng.below(uint64_t(i), uint64_t(below)))); });
}

double roundoff(DType t) {
  switch (t) {
    case DType::f64: return 0x1p-53;
    case DType::f32: return 0x1p-24;
    case DType::f16: return 0x1p-11;
    case DType::bf16: return 0x1p-8;
    default: return 0;
  }
}

Comparison compare(const Tensor& got, const std::vector<double>& want, double absolute, double relative) {
  Comparison result;
  if (int64_t(want.size()) != got.numel()) {
    result.message = detail::concat("found ", got.numel(), " elements, expected ", want.size());
    return result;
  }
  const std::vector<double> have = values(got);
  for (size_t i = 0; i < want.size(); ++i) {
    const double allowed = absolute + relative * std::abs(want[i]);
    const bool same = have[i] == want[i] || (std::isnan(have[i]) && std::isnan(want[i]));
    const double off = same                                               ? 0
                       : std::isfinite(have[i]) && std::isfinite(want[i]) ? std::abs(have[i] - want[i]) / allowed
                                                                          : HUGE_VAL;
    if (off > result.worst || std::isnan(off)) {
      result.worst = std::isnan(off) ? HUGE_VAL : off;
      if (!(off <= 1))
        result.message = detail::concat("element ", i, " of ", got.shape, ": found ", have[i], ", expected ", want[i],
                                        " within ", allowed, " (off by ", off, " times that)");
    }
  }
  result.ok = result.worst <= 1;
  return result;
}

double dot(const Tensor& t, const Tensor& weights) {
  const auto a = values(t), b = values(weights);
  INGOT_CHECK_EQ(a.size(), b.size(), "dot");
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

double gradient_error(const std::function<double()>& f, const Tensor& input, const Tensor& grad, uint64_t seed,
                      int directions) {
  INGOT_CHECK(input.dtype == DType::f64 && grad.dtype == DType::f64, "gradient_error: found ", input.dtype,
              ", expected f64");
  const std::vector<double> start = values(input), g = values(grad);
  double size = 0;
  for (double v : start) size += v * v;
  size = std::sqrt(size / double(std::max<size_t>(1, start.size())));
  double worst = 0;
  for (int d = 0; d < directions; ++d) {
    const Rng rng(seed, Purpose::test, uint32_t(100 + d));
    std::vector<double> moved = start;
    const double h = 6e-6 * std::max(size, 1e-2);
    double analytic = 0, norm = 0;
    std::vector<double> direction(start.size());
    for (size_t i = 0; i < start.size(); ++i) {
      direction[i] = rng.normal(i);
      analytic += direction[i] * g[i];
      norm += direction[i] * direction[i] * g[i] * g[i];
    }
    for (size_t i = 0; i < start.size(); ++i) moved[i] = start[i] + h * direction[i];
    assign(input, moved);
    const double up = f();
    for (size_t i = 0; i < start.size(); ++i) moved[i] = start[i] - h * direction[i];
    assign(input, moved);
    const double down = f();
    assign(input, start);
    const double numeric = (up - down) / (2 * h);
    // Relative to the size a sum of this many independent terms has, so that cancellation along a direction does not
    // fail the check.
    worst = std::max(worst, std::abs(numeric - analytic) / std::max({std::sqrt(norm), std::abs(analytic), 1e-8}));
  }
  return worst;
}

}  // namespace ingot::testing
