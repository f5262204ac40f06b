#include "ingot/kernels/softcap/softcap.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::Operands;
using testing::timed;

constexpr int64_t T = 256, C = 1024;     // rows, columns
constexpr double kTensor = 4.0 * T * C;  // bytes of a tensor

}  // namespace

INGOT_BENCH(softcap) {
  return {
      timed({.suite = "softcap", .name = "forward", .shape = "256x1024", .dtype = "f32", .bytes = 2 * kTensor},
            [](Operands& o) {
              const Softcap a{.x = o.normal({T, C}, 20), .y = o.zeros({T, C})};
              return [=] { softcap(a, {}); };
            }),
  };
}

}  // namespace ingot
