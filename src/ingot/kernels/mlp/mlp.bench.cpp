#include "ingot/kernels/mlp/mlp.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::BenchCase;
using testing::Operands;
using testing::timed;

constexpr int64_t T = 4096, C = 128;  // rows, width of all three layers
constexpr double kFlops = 3 * 2.0 * T * C * C;

std::vector<MlpLayer> layers(Operands& o, bool gradients) {
  std::vector<MlpLayer> all;
  for (int l = 0; l < 3; ++l)
    all.push_back(gradients ? MlpLayer{.w = o.zeros({C, C}), .b = o.zeros({C})}
                            : MlpLayer{.w = o.normal({C, C}, 0.1), .b = o.normal({C}, 0.1)});
  return all;
}
Mlp forward(Operands& o) {
  Mlp m{.x = o.normal({T, C}), .y = o.zeros({T, C}), .layers = layers(o, false), .act = act_of<Softplus>};
  m.saved = o.zeros({mlp_saved_elements(T, m.layers, false)});
  m.workspace = o.workspace(mlp_workspace_bytes(m));
  return m;
}

}  // namespace

INGOT_BENCH(mlp) {
  return {
      timed({.suite = "mlp", .name = "3 layers", .shape = "4096x128", .dtype = "f32", .flops = kFlops},
            [](Operands& o) {
              const Mlp m = forward(o);
              return [=] { mlp(m, {}); };
            }),
      timed({.suite = "mlp", .name = "3 layers, backward", .shape = "4096x128", .dtype = "f32", .flops = 2 * kFlops},
            [](Operands& o) {
              const Mlp m = forward(o);
              mlp(m, {});
              MlpBackward b{.dy = o.normal({T, C}),
                            .x = m.x,
                            .dx = o.zeros({T, C}),
                            .layers = m.layers,
                            .grads = layers(o, true),
                            .act = m.act,
                            .saved = m.saved};
              b.workspace = o.workspace(mlp_backward_workspace_bytes(b));
              return [=] { mlp_backward(b, {}); };
            })};
}

}  // namespace ingot
