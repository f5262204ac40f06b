#include "ingot/kernels/axpby/axpby.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::Operands;
using testing::timed;

constexpr int64_t T = 4096, C = 1024;    // rows, columns
constexpr double kTensor = 4.0 * T * C;  // bytes of a tensor

}  // namespace

INGOT_BENCH(axpby) {
  return {
      timed({.suite = "axpby", .name = "forward", .shape = "4096x1024", .dtype = "f32", .bytes = 3 * kTensor},
            [](Operands& o) {
              const Axpby a{o.normal({T, C}), o.zeros({T, C}), 1, 1};
              return [=] { axpby(a, {}); };
            }),
  };
}

}  // namespace ingot
