#include "ingot/kernels/rope/rope.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::Operands;
using testing::timed;

constexpr int64_t T = 4096, H = 16, D = 64;  // tokens, heads, head_dim
constexpr double kTensor = 4.0 * T * H * D;  // bytes of a tensor

}  // namespace

INGOT_BENCH(rope) {
  return {
      timed({.suite = "rope", .name = "rotate", .shape = "4096x16x64", .dtype = "f32", .bytes = 2 * kTensor},
            [](Operands& o) {
              const Rope a{.x = o.normal({T, H, D}),
                           .y = o.zeros({T, H, D}),
                           .positions = o.counting(T),
                           .cos = o.normal({T, D / 2}),
                           .sin = o.normal({T, D / 2})};
              return [=] { rope(a, {}); };
            }),
      timed({.suite = "rope",
             .name = "qk norm, rotate and gain",
             .shape = "4096x16x64",
             .dtype = "f32",
             .bytes = 2 * kTensor},
            [](Operands& o) {
              const QkNormRope a{.x = o.normal({T, H, D}),
                                 .y = o.zeros({T, H, D}),
                                 .positions = o.counting(T),
                                 .cos = o.normal({T, D / 2}),
                                 .sin = o.normal({T, D / 2}),
                                 .gain = o.normal({H})};
              return [=] { qk_norm_rope(a, {}); };
            }),
      timed({.suite = "rope",
             .name = "qk norm, rotate and gain, backward",
             .shape = "4096x16x64",
             .dtype = "f32",
             .bytes = 3 * kTensor},
            [](Operands& o) {
              const Tensor workspace = o.workspace(qk_norm_rope_backward_workspace_bytes(T, H, {}));
              const QkNormRopeBackward a{.x = o.normal({T, H, D}),
                                         .dy = o.normal({T, H, D}),
                                         .dx = o.zeros({T, H, D}),
                                         .positions = o.counting(T),
                                         .cos = o.normal({T, D / 2}),
                                         .sin = o.normal({T, D / 2}),
                                         .gain = o.normal({H}),
                                         .dgain = o.zeros({H}),
                                         .workspace = workspace};
              return [=] { qk_norm_rope_backward(a, {}); };
            }),
  };
}

}  // namespace ingot
