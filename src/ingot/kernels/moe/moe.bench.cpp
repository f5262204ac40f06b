#include "ingot/kernels/moe/moe.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::Operands;
using testing::timed;

// A step of decoding with small sizes: T tokens, k of E experts each, width C, hidden H.
constexpr int64_t T = 8, E = 32, k = 4, C = 512, H = 512;

WeightMatrix mxfp4(Operands& o, int64_t rows, int64_t cols) {
  return {WeightFormat::mxfp4, o.bytes({E, rows, cols / kMxBlock, 16}), o.bytes({E, rows, cols / kMxBlock}, 119, 4)};
}

}  // namespace

INGOT_BENCH(moe) {
  return {
      timed({.suite = "moe", .name = "experts, mxfp4", .shape = "8x32x4", .dtype = "f32", .flops = 6.0 * T * k * C * H},
            [](Operands& o) {
              const Tensor workspace = o.workspace(experts_workspace_bytes(T, k, E, C, H, DType::f32, {}));
              const Tensor chosen = o.zeros({T, k}, DType::i32), weights = o.zeros({T, k});
              route({.logits = o.normal({T, E}), .experts = chosen, .weights = weights}, {});
              const Experts a{.x = o.normal({T, C}),
                              .experts = chosen,
                              .weights = weights,
                              .gate_up = mxfp4(o, 2 * H, C),
                              .down = mxfp4(o, C, H),
                              .y = o.zeros({T, C}),
                              .workspace = workspace,
                              .options = {.limit = 7, .alpha = 1.702, .up_offset = 1}};
              return [=] { experts(a, {}); };
            }),
  };
}

}  // namespace ingot
