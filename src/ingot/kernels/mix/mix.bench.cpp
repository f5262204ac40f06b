#include "ingot/kernels/mix/mix.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::Operands;
using testing::timed;

constexpr int64_t T = 4096, C = 1024;    // rows, columns
constexpr double kTensor = 4.0 * T * C;  // bytes of a tensor

}  // namespace

INGOT_BENCH(mix) {
  return {
      timed({.suite = "mix", .name = "forward", .shape = "4096x1024", .dtype = "f32", .bytes = 3 * kTensor},
            [](Operands& o) {
              const Mix a{o.normal({T, C}), o.normal({T, C}), o.normal({C}), o.normal({C}), o.zeros({T, C})};
              return [=] { mix(a, {}); };
            }),
  };
}

}  // namespace ingot
