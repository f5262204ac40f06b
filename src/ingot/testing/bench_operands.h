#pragma once
// The operands of a benchmark's case: made before the measurement, freed afterwards.
//   timed({.suite = "softcap", .name = "forward", .shape = "64x64", .dtype = "f32"}, [](Operands& o) {
//     const Softcap a{.x = o.normal({64, 64}), .y = o.zeros({64, 64})};
//     return [=] { softcap(a, {}); };
//   })
#include <algorithm>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>

#include "ingot/testing/bench.h"
#include "ingot/testing/testing.h"

namespace ingot::testing {

class Operands {
 public:
  // Normal numbers, the same 65,536 again and again: no operation here becomes faster through the repetition.
  Tensor normal(Shape shape, double scale = 1) {
    const Tensor t = take(DType::f32, shape);
    const int64_t n = t.numel(), random = std::min<int64_t>(n, 1 << 16);
    fill_normal(Tensor(t.ptr<float>(), {random}), buffers_.size(), scale);
    for (int64_t i = random; i < n; i += random)
      std::copy_n(t.ptr<float>(), std::min(random, n - i), t.ptr<float>() + i);
    return t;
  }
  Tensor zeros(Shape shape, DType dtype = DType::f32) {
    const Tensor t = take(dtype, shape);
    std::memset(t.data, 0, size_t(t.bytes()));
    return t;
  }
  Tensor ids(Shape shape, int64_t below) {
    const Tensor t = take(DType::i32, shape);
    fill_ids(t, buffers_.size(), below);
    return t;
  }
  // Bytes `low` to `low + count - 1`, repeated.
  Tensor bytes(Shape shape, int low = 0, int count = 256) {
    const Tensor t = take(DType::u8, shape);
    for (int64_t i = 0; i < t.numel(); ++i) t.ptr<uint8_t>()[i] = uint8_t(low + i * 37 % count);
    return t;
  }
  Tensor counting(int64_t n, int64_t step = 1) {  // 0, step, 2 step ...
    const Tensor t = take(DType::i32, {n});
    for (int64_t i = 0; i < n; ++i) t.ptr<int32_t>()[i] = int32_t(i * step);
    return t;
  }
  Tensor workspace(int64_t size) { return take(DType::u8, {size}); }

 private:
  Tensor take(DType dtype, Shape shape) { return buffers_.emplace_back(dtype, shape); }
  std::deque<Buffer> buffers_;
};

template <class Make> BenchCase timed(BenchCase c, Make make) {
  c.make = [make = std::move(make)] {
    const auto operands = std::make_shared<Operands>();
    return std::function<void()>([operands, run = make(*operands)] { run(); });
  };
  return c;
}

}  // namespace ingot::testing
