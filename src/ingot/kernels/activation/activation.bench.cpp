#include "ingot/kernels/activation/activation.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::BenchCase;
using testing::Operands;
using testing::timed;

constexpr int64_t T = 4096, C = 1024;    // rows, columns
constexpr double kTensor = 4.0 * T * C;  // bytes of a tensor

void add_cases(const std::string& word, std::vector<BenchCase>& all) {
  const Act act = activation_named(word);
  all.push_back(timed({.suite = "activation", .name = word, .shape = "4096x1024", .dtype = "f32", .bytes = 2 * kTensor},
                      [act](Operands& o) {
                        const Activate a{.act = act, .x = o.normal({T, C}), .y = o.zeros({T, C})};
                        return [=] { activate(a, {}); };
                      }));
  all.push_back(timed(
      {.suite = "activation", .name = word + " backward", .shape = "4096x1024", .dtype = "f32", .bytes = 3 * kTensor},
      [act](Operands& o) {
        const ActivateBackward a{.act = act, .dy = o.normal({T, C}), .x = o.normal({T, C}), .dx = o.zeros({T, C})};
        return [=] { activate_backward(a, {}); };
      }));
}

}  // namespace

INGOT_BENCH(activation) {
  std::vector<BenchCase> all;
  add_cases("silu", all);
  add_cases("gelu", all);
  add_cases("softplus", all);
  return all;
}

}  // namespace ingot
