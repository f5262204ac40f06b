#include "ingot/kernels/sum/sum.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::Operands;
using testing::timed;

constexpr int64_t kCount = 4096;  // the losses of a batch

}  // namespace

INGOT_BENCH(sum) {
  return {
      timed({.suite = "sum", .name = "losses", .shape = "4096", .dtype = "f32", .bytes = 4.0 * kCount},
            [](Operands& o) {
              const Sum a{.x = o.normal({kCount}), .total = o.zeros({1}, DType::f64)};
              return [=] { sum(a, {}); };
            }),
  };
}

}  // namespace ingot
