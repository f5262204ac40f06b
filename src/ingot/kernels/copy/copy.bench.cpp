#include "ingot/kernels/copy/copy.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::Operands;
using testing::timed;

constexpr int64_t T = 4096, C = 1024;    // rows, columns
constexpr double kTensor = 4.0 * T * C;  // bytes of one tensor

}  // namespace

INGOT_BENCH(copy) {
  return {
      timed({.suite = "copy", .name = "copy", .shape = "4096x1024", .dtype = "f32", .bytes = 2 * kTensor},
            [](Operands& o) {
              const Copy a{.from = o.normal({T, C}), .to = o.zeros({T, C})};
              return [=] { copy(a, {}); };
            }),
      timed({.suite = "copy", .name = "fill", .shape = "4096x1024", .dtype = "f32", .bytes = kTensor},
            [](Operands& o) {
              const Fill a{.to = o.zeros({T, C}), .value = 1};
              return [=] { fill(a, {}); };
            }),
  };
}

}  // namespace ingot
