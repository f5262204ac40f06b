#include "ingot/kernels/expert_linear/expert_linear.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::BenchCase;
using testing::Operands;
using testing::timed;

// E experts with the same number of rows each: R rows in all, K columns to N.
constexpr int64_t E = 8, R = 1024, N = 256, K = 128;
Tensor offsets(Operands& o) { return o.counting(E + 1, R / E); }
BenchCase about(const char* name, int products) {
  return {.suite = "expert_linear",
          .name = name,
          .shape = "8x1024x256x128",
          .dtype = "f32",
          .flops = 2.0 * R * N * K * products,
          .limit_flops = testing::fma_bound_f32()};
}

}  // namespace

INGOT_BENCH(expert_linear) {
  return {
      timed(about("narrow forward", 1),
            [](Operands& o) {
              const ExpertLinear a{.x = o.normal({R, K}),
                                   .w = o.normal({E, N, K}, 0.1),
                                   .b = o.normal({E, N}),
                                   .offsets = offsets(o),
                                   .y = o.zeros({R, N})};
              return [=] { expert_linear(a, {}); };
            }),
      timed(about("narrow backward", 2),
            [](Operands& o) {
              const ExpertLinearBackward a{.dy = o.normal({R, N}),
                                           .x = o.normal({R, K}),
                                           .w = o.normal({E, N, K}, 0.1),
                                           .offsets = offsets(o),
                                           .dx = o.zeros({R, K}),
                                           .dw = o.zeros({E, N, K}),
                                           .db = o.zeros({E, N})};
              return [=] { expert_linear_backward(a, {}); };
            }),
  };
}

}  // namespace ingot
