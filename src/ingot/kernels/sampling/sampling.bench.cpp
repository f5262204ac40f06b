#include "ingot/kernels/sampling/sampling.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::Operands;
using testing::timed;

constexpr int64_t V = 201088;  // the vocabulary of GPT-OSS

testing::BenchCase tokens(const char* name, int64_t rows, const SamplingOptions& options) {
  return timed(
      {.suite = "sampling",
       .name = name,
       .shape = rows == 1 ? "1x201088" : "16x201088",
       .dtype = "f32",
       .bytes = 4.0 * double(rows * V)},
      [rows, options](Operands& o) {
        const Sample a{.logits = o.normal({rows, V}, 3), .tokens = o.zeros({rows}, DType::i32), .options = options};
        return [=] { sample(a, {}); };
      });
}

}  // namespace

INGOT_BENCH(sampling) {
  std::vector<testing::BenchCase> cases;
  for (const int64_t rows : {1, 16}) {
    cases.push_back(tokens("greedy", rows, {.temperature = 0}));
    cases.push_back(tokens("temperature", rows, {}));
    cases.push_back(tokens("top-k 40", rows, {.top_k = 40}));
    cases.push_back(tokens("top-p 0.95", rows, {.top_p = 0.95}));
    cases.push_back(tokens("min-p 0.05", rows, {.min_p = 0.05}));
    cases.push_back(tokens("all filters", rows, {.top_k = 40, .top_p = 0.9, .min_p = 0.05}));
  }
  return cases;
}

}  // namespace ingot
