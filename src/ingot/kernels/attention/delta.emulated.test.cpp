// Runs the CUDA kernels of delta and of the sinks' gradient on the CPU, under sanitizers.
#include "ingot/kernels/attention/delta.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::values;

// The tolerance: sums of d products of numbers of size 1, and of `tokens` terms, with a few roundings of fp32 for each.
TEST(AttentionRowSumsEmulated, AreSumsOverColumnsLessTheGradientOfLse) {
  constexpr int64_t T = 37, H = 3;
  for (int64_t d : {8, 40, 256})
    for (bool with_dlse : {false, true}) {
      SCOPED_TRACE(::testing::Message() << d << ' ' << with_dlse);
      Buffer out(DType::f16, {T, H, d}, d + 8), dout(DType::f16, {T, H, d}), lse(DType::f32, {H, T}),
          dlse(DType::f32, {H, T}), sinks(DType::f32, {H}), dsinks(DType::f32, {H}), delta(DType::f32, {H, T});
      testing::fill_normal(out, 1), testing::fill_normal(dout, 2), testing::fill_normal(lse, 3),
          testing::fill_normal(dlse, 4), testing::fill_normal(sinks, 5), testing::fill_normal(dsinks, 6);
      lse.tensor().ptr<float>()[5] = -INFINITY;  // a row that sees no key: no gradient
      const auto before = values(dsinks);
      AttentionBackward a{.q = out, .k = out, .v = out, .sinks = sinks, .out = out, .lse = lse, .dout = dout};
      a.dsinks = dsinks;
      if (with_dlse) a.dlse = dlse;
      cuda::attention_row_sums(a, delta.tensor().ptr<float>(), T, {});
      const auto o = values(out), g = values(dout), l = values(lse), gl = values(dlse), s = values(sinks),
                 got = values(delta), sums = values(dsinks);
      for (int64_t h = 0; h < H; ++h) {
        double dsink = before[size_t(h)];
        for (int64_t t = 0; t < T; ++t) {
          const size_t at = size_t(h * T + t);
          double sum = 0;
          for (int64_t c = 0; c < d; ++c) sum += o[size_t((t * H + h) * d + c)] * g[size_t((t * H + h) * d + c)];
          if (std::isinf(l[at])) {
            EXPECT_NEAR(got[at], sum, 1e-6 * double(d));
            continue;
          }
          if (with_dlse) sum -= gl[at];
          EXPECT_NEAR(got[at], sum, 1e-6 * double(d));
          dsink -= std::exp(s[size_t(h)] - l[at]) * sum;
        }
        EXPECT_NEAR(sums[size_t(h)], dsink, 1e-3);
      }
      EXPECT_TRUE(delta.guards_intact() && dsinks.guards_intact());
    }
}

}  // namespace
}  // namespace ingot
