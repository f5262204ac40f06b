#include "ingot/kernels/sampling/sampling.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::Operands;
using testing::timed;

constexpr int64_t V = 201088;  // the vocabulary of GPT-OSS

}  // namespace

INGOT_BENCH(sampling) {
  return {
      timed({.suite = "sampling", .name = "greedy", .shape = "1x201088", .dtype = "f32", .bytes = 4.0 * V},
            [](Operands& o) {
              const Sample a{
                  .logits = o.normal({1, V}, 3), .tokens = o.zeros({1}, DType::i32), .options = {.temperature = 0}};
              return [=] { sample(a, {}); };
            }),
      timed({.suite = "sampling", .name = "top-p 0.95", .shape = "1x201088", .dtype = "f32", .bytes = 4.0 * V},
            [](Operands& o) {
              const Sample a{
                  .logits = o.normal({1, V}, 3), .tokens = o.zeros({1}, DType::i32), .options = {.top_p = 0.95}};
              return [=] { sample(a, {}); };
            }),
  };
}

}  // namespace ingot
