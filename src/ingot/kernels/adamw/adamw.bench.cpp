#include "ingot/kernels/adamw/adamw.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::Operands;
using testing::timed;

constexpr int64_t kCount = int64_t(1) << 22;  // parameters
constexpr double kTensor = 4.0 * kCount;      // bytes of a tensor

}  // namespace

INGOT_BENCH(adamw) {
  return {
      timed({.suite = "adamw", .name = "step", .shape = "4194304", .dtype = "f32", .bytes = 7 * kTensor},
            [](Operands& o) {
              const AdamW a{
                  .p = o.normal({kCount}), .g = o.normal({kCount}), .m = o.zeros({kCount}), .v = o.zeros({kCount})};
              return [=] { adamw(a, {}); };
            }),
      timed({.suite = "adamw", .name = "average", .shape = "4194304", .dtype = "f32", .bytes = 3 * kTensor},
            [](Operands& o) {
              const Ema a{.p = o.normal({kCount}), .average = o.zeros({kCount})};
              return [=] { ema(a, {}); };
            }),
      timed({.suite = "adamw", .name = "sum of squares", .shape = "4194304", .dtype = "f32", .bytes = kTensor},
            [](Operands& o) {
              const SumOfSquares a{.x = o.normal({kCount}),
                                   .sum = o.zeros({1}, DType::f64),
                                   .workspace = o.workspace(sum_of_squares_workspace_bytes(kCount, {}))};
              return [=] { sum_of_squares(a, {}); };
            }),
  };
}

}  // namespace ingot
