#include "ingot/kernels/attention/attention.h"

#include "ingot/testing/bench_operands.h"

namespace ingot {
namespace {

using testing::BenchCase;
using testing::Operands;
using testing::timed;

constexpr int64_t T = 1024, H = 8, D = 64;  // tokens, heads, head_dim

Attention causal(Operands& o, int64_t segment, int64_t window) {
  return {.q = o.normal({T, H, D}),
          .k = o.normal({T, H, D}),
          .v = o.normal({T, H, D}),
          .cu_q = o.counting(T / segment + 1, segment),
          .out = o.zeros({T, H, D}),
          .lse = o.zeros({H, T}),
          .scale = 0.125,
          .window = window};
}

std::vector<BenchCase> cases(const char* name, int64_t segment, int64_t window) {
  Operands shapes;
  const double work = double(flops(causal(shapes, segment, window)));
  const auto forward = [=](Operands& o) {
    const Attention a = causal(o, segment, window);
    return [=] { attention(a, {}); };
  };
  const auto backward = [=](Operands& o) {
    const Attention a = causal(o, segment, window);
    attention(a, {});
    const AttentionBackward b{.q = a.q,
                              .k = a.k,
                              .v = a.v,
                              .cu_q = a.cu_q,
                              .out = a.out,
                              .lse = a.lse,
                              .dout = o.normal({T, H, D}),
                              .dq = o.zeros({T, H, D}),
                              .dk = o.zeros({T, H, D}),
                              .dv = o.zeros({T, H, D}),
                              .scale = a.scale,
                              .window = window};
    return [=] { attention_backward(b, {}); };
  };
  const BenchCase c{.suite = "attention", .name = name, .shape = "1024x8x64", .dtype = "f32"};
  BenchCase f = c, b = c;
  f.flops = work;
  b.name += ", backward";
  b.flops = 2.5 * work;  // the backward pass has five products of the scores' size, the forward pass two
  return {timed(f, forward), timed(b, backward)};
}

}  // namespace

INGOT_BENCH(attention) {
  std::vector<BenchCase> all;
  for (auto& some : {cases("causal", 1024, 0), cases("8 segments", 128, 0), cases("window of 128", 1024, 128)})
    all.insert(all.end(), some.begin(), some.end());
  return all;
}

}  // namespace ingot
