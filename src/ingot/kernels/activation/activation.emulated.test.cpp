// The CUDA kernels of the activations and their launcher on the CPU, where sanitizers see their accesses.
#include "ingot/kernels/activation/activation.h"

#include <gtest/gtest.h>

#include "ingot/testing/testing.h"

namespace ingot {
namespace cuda {
void activate(const Activate& a, Stream stream);
void activate_backward(const ActivateBackward& a, Stream stream);
}  // namespace cuda
namespace {

using testing::Buffer;
using testing::compare;
using testing::roundoff;
using testing::values;

TEST(ActivationEmulated, EveryActivationAgreesWithTheFp64Loop) {
  int acts = 0;
  for_each_activation([&](auto) { ++acts; });
  for (int act = 0; act < acts; ++act)
    for (DType t : {DType::f32, DType::bf16})
      for (const auto& [cols, gap] : {std::pair<int64_t, int64_t>{24, 0}, {24, 8}, {7, 0}, {7, 2}}) {
        SCOPED_TRACE(::testing::Message() << name_of(Act(act)) << ' ' << t << " cols " << cols << " gap " << gap);
        const Shape shape{5, cols};
        Buffer x(t, shape, cols + gap), y(t, shape, cols + gap), dy(t, shape, cols + gap), dx(t, shape, cols + gap);
        testing::fill_normal(x, 1, 2), testing::fill_normal(dy, 2);
        Buffer exact(DType::f64, shape), exact_dy(DType::f64, shape), want(DType::f64, shape),
            want_dx(DType::f64, shape);
        testing::assign(exact, values(x)), testing::assign(exact_dy, values(dy));
        cuda::activate({.act = Act(act), .x = x, .y = y}, {});
        cuda::activate_backward({.act = Act(act), .dy = dy, .x = x, .dx = dx}, {});
        activate({.act = Act(act), .x = exact, .y = want}, {});
        activate_backward({.act = Act(act), .dy = exact_dy, .x = exact, .dx = want_dx}, {});
        // An argument below 8 off by a rounding, some roundings of a value below 64.
        const double u = roundoff(DType::f32), relative = 1.01 * roundoff(t) + 16 * u;
        const auto first = compare(y, values(want), 64 * u, relative);
        EXPECT_TRUE(first.ok) << first.message;
        const auto second = compare(dx, values(want_dx), 64 * u, relative);
        EXPECT_TRUE(second.ok) << second.message;
        EXPECT_TRUE(x.guards_intact() && y.guards_intact() && dy.guards_intact() && dx.guards_intact());
      }
}

}  // namespace
}  // namespace ingot
