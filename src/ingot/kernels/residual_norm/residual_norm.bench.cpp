#include "ingot/kernels/residual_norm/residual_norm.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::Operands;
using testing::timed;

constexpr int64_t T = 4096, C = 1024;    // rows, columns
constexpr double kTensor = 4.0 * T * C;  // bytes of a tensor

}  // namespace

INGOT_BENCH(residual_norm) {
  return {
      timed({.suite = "residual_norm",
             .name = "mix and norm",
             .shape = "4096x1024",
             .dtype = "f32",
             .bytes = 4 * kTensor},
            [](Operands& o) {
              const ResidualNorm r{.x = o.normal({T, C}),
                                   .x0 = o.normal({T, C}),
                                   .a = o.normal({C}),
                                   .b = o.normal({C}),
                                   .mixed = o.zeros({T, C}),
                                   .y = o.zeros({T, C})};
              return [=] { residual_norm(r, {}); };
            }),
      timed({.suite = "residual_norm",
             .name = "sum and norm",
             .shape = "4096x1024",
             .dtype = "f32",
             .bytes = 4 * kTensor},
            [](Operands& o) {
              const ResidualNorm r{.x = o.normal({T, C}),
                                   .branch = o.normal({T, C}),
                                   .scale = o.normal({C}),
                                   .sum = o.zeros({T, C}),
                                   .y = o.zeros({T, C})};
              return [=] { residual_norm(r, {}); };
            }),
  };
}

}  // namespace ingot
