#include "ingot/kernels/muon/muon.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::Operands;
using testing::timed;

constexpr int64_t B = 4, N = 256;    // matrices of N x N
constexpr double kProducts = 5 * 3;  // three a Newton-Schulz step

}  // namespace

INGOT_BENCH(muon) {
  return {
      timed({.suite = "muon",
             .name = "step",
             .shape = "4x256x256",
             .dtype = "f32",
             .flops = kProducts * 2.0 * B * N * N * N},
            [](Operands& o) {
              const Tensor workspace = o.workspace(muon_workspace_bytes(B, N, N, DType::f32, {}));
              const Muon a{.p = o.normal({B, N, N}, 0.06),
                           .g = o.normal({B, N, N}),
                           .momentum = o.zeros({B, N, N}),
                           .workspace = workspace};
              return [=] { muon(a, {}); };
            }),
  };
}

}  // namespace ingot
