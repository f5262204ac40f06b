#include "ingot/kernels/rmsnorm/rmsnorm.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::Operands;
using testing::timed;

constexpr int64_t T = 4096, C = 1024;    // rows, columns
constexpr double kTensor = 4.0 * T * C;  // bytes of a tensor

}  // namespace

INGOT_BENCH(rmsnorm) {
  return {
      timed({.suite = "rmsnorm", .name = "forward", .shape = "4096x1024", .dtype = "f32", .bytes = 2 * kTensor},
            [](Operands& o) {
              const RmsNorm a{.x = o.normal({T, C}), .w = o.normal({C}), .y = o.zeros({T, C}), .rstd = o.zeros({T})};
              return [=] { rmsnorm(a, {}); };
            }),
      timed({.suite = "rmsnorm", .name = "backward", .shape = "4096x1024", .dtype = "f32", .bytes = 3 * kTensor},
            [](Operands& o) {
              const Tensor workspace = o.workspace(rmsnorm_backward_workspace_bytes(T, C, DType::f32, {}));
              const RmsNormBackward a{.dy = o.normal({T, C}),
                                      .s = o.normal({T, C}),
                                      .w = o.normal({C}),
                                      .dx = o.zeros({T, C}),
                                      .dw = o.zeros({C}),
                                      .workspace = workspace};
              return [=] { rmsnorm_backward(a, {}); };
            }),
  };
}

}  // namespace ingot
