// The gate's CUDA kernels and their launcher on the CPU, under every configuration, where sanitizers see their
// accesses.
#include "ingot/kernels/swiglu/swiglu.h"

#include <gtest/gtest.h>

#include "ingot/kernels/swiglu/swiglu_config.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::compare;
using testing::roundoff;
using testing::values;

// Tolerances as in the tests on a GPU (swiglu.cuda.test.cpp).
TEST(SwigluGateEmulated, EveryConfigurationAgreesWithTheFp64Loop) {
  constexpr int64_t kRows = 5;
  for (DType t : {DType::f32, DType::bf16, DType::f16})
    for (int64_t hidden : {24, 7})
      for (int64_t gap : {0, 8})
        for (bool interleaved : {false, true})
          for (int units : {1, 2, 4})
            for (bool vectors : {false, true}) {
              if (vectors && hidden == 7) continue;
              SCOPED_TRACE(::testing::Message() << t << " hidden " << hidden << " gap " << gap << " interleaved "
                                                << interleaved << " units " << units << " vectors " << vectors);
              const GateOptions options{.limit = 1.5, .alpha = 1.702, .up_offset = 1, .interleaved = interleaved};
              const int64_t width = 2 * hidden;
              const auto halves = [&](const Tensor& both) {
                if (interleaved) return std::pair(both, Tensor());
                return std::pair(both.slice(1, hidden, width), both.slice(1, 0, hidden));
              };
              const auto wide = [&](const Buffer& b) {
                Buffer exact(DType::f64, b.tensor().shape);
                testing::assign(exact, values(b));
                return exact;
              };
              Buffer both(t, {kRows, width}, width + gap), dboth(t, {kRows, width}, width + gap),
                  h(t, {kRows, hidden}, hidden + gap), dh(t, {kRows, hidden}, hidden + gap);
              testing::fill_normal(both, 1, 3), testing::fill_normal(dh, 2);
              const Buffer exact = wide(both), exact_dh = wide(dh), want_h(DType::f64, {kRows, hidden}),
                           want(DType::f64, {kRows, width});
              const cuda::SwigluGateTuning tuning{
                  .config = {.vectors = vectors, .units_per_thread = units, .threads = 32}, .large = units == 1};
              const auto [gate, up] = halves(both);
              const auto [dgate, dup] = halves(dboth);
              cuda::swiglu_gate_with({.gate = gate, .up = up, .h = h, .options = options}, tuning, {});
              cuda::swiglu_gate_backward_with(
                  {.gate = gate, .up = up, .dh = dh, .dgate = dgate, .dup = dup, .options = options}, tuning, {});
              const auto [exact_gate, exact_up] = halves(exact);
              const auto [want_gate, want_up] = halves(want);
              swiglu_gate({.gate = exact_gate, .up = exact_up, .h = want_h, .options = options}, {});
              swiglu_gate_backward({.gate = exact_gate,
                                    .up = exact_up,
                                    .dh = exact_dh,
                                    .dgate = want_gate,
                                    .dup = want_up,
                                    .options = options},
                                   {});
              const double u = roundoff(DType::f32), relative = 1.01 * roundoff(t) + 40 * u;
              const auto first = compare(h, values(want_h), 0x1p-24, relative);
              EXPECT_TRUE(first.ok) << "h: " << first.message;
              const auto second = compare(dboth, values(want), 0x1p-24 + 5 * 18 * 2 * 4 * u, relative);
              EXPECT_TRUE(second.ok) << "dgate and dup: " << second.message;
              // Written over gate and up, the gradients have the same bits.
              cuda::swiglu_gate_backward_with(
                  {.gate = gate, .up = up, .dh = dh, .dgate = gate, .dup = up, .options = options}, tuning, {});
              EXPECT_EQ(values(both), values(dboth)) << "in place";
              // h computed again replaces dh. The gate of the forward pass alone may take a shorter formula.
              testing::assign(both, values(exact));
              cuda::swiglu_gate_backward_with(
                  {.gate = gate, .up = up, .dh = dh, .dgate = gate, .dup = up, .options = options, .h = dh}, tuning,
                  {});
              EXPECT_EQ(values(both), values(dboth)) << "with h";
              const auto again = compare(dh, values(want_h), 0x1p-24, relative);
              EXPECT_TRUE(again.ok) << "h again: " << again.message;
              EXPECT_TRUE(both.guards_intact() && dboth.guards_intact() && h.guards_intact() && dh.guards_intact());
            }
}

}  // namespace
}  // namespace ingot
