#include "ingot/kernels/swiglu/swiglu.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::Operands;
using testing::timed;

constexpr int64_t T = 4096, C = 1024;    // rows, columns
constexpr double kTensor = 4.0 * T * C;  // bytes of a tensor

}  // namespace

INGOT_BENCH(swiglu) {
  return {
      timed({.suite = "swiglu", .name = "gate", .shape = "4096x1024", .dtype = "f32", .bytes = 3 * kTensor},
            [](Operands& o) {
              const SwigluGate a{.gate = o.normal({T, C}), .up = o.normal({T, C}), .h = o.zeros({T, C}), .options = {}};
              return [=] { swiglu_gate(a, {}); };
            }),
      timed({.suite = "swiglu", .name = "gate backward", .shape = "4096x1024", .dtype = "f32", .bytes = 5 * kTensor},
            [](Operands& o) {
              const SwigluGateBackward a{.gate = o.normal({T, C}),
                                         .up = o.normal({T, C}),
                                         .dh = o.normal({T, C}),
                                         .dgate = o.zeros({T, C}),
                                         .dup = o.zeros({T, C}),
                                         .options = {}};
              return [=] { swiglu_gate_backward(a, {}); };
            }),
      timed({.suite = "swiglu",
             .name = "gated MLP",
             .shape = "512x256x1024",
             .dtype = "f32",
             .flops = 6.0 * 512 * 256 * 1024},
            [](Operands& o) {
              const Tensor workspace = o.workspace(swiglu_workspace_bytes(512, 1024, DType::f32, {}));
              const Swiglu a{.x = o.normal({512, 256}),
                             .w_gate = o.normal({1024, 256}, 0.06),
                             .w_up = o.normal({1024, 256}, 0.06),
                             .w_down = o.normal({256, 1024}, 0.03),
                             .y = o.zeros({512, 256}),
                             .gate = o.zeros({512, 1024}),
                             .up = o.zeros({512, 1024}),
                             .workspace = workspace};
              return [=] { swiglu(a, {}); };
            }),
  };
}

}  // namespace ingot
