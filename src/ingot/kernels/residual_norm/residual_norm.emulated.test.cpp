// The backward kernel on the CPU, where sanitizers see its accesses, beside the separate operations in fp64.
#include "ingot/kernels/residual_norm/residual_norm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ingot/testing/any_buffer.h"

namespace ingot {
namespace cuda {
bool residual_norm_backward(const ResidualNormBackward& r, Stream stream);
}  // namespace cuda
namespace {

using testing::Buffer;
using testing::values;

// A tensor of rows or factors, and the same numbers in fp64.
struct Pair {
  Pair(DType type, Shape shape, uint64_t seed)
      : rounded(testing::normal<Buffer>(type, shape, seed)), exact(testing::exact(rounded)) {}
  Buffer rounded, exact;
};

TEST(ResidualNormEmulated, GradientsOfFurtherReadersAreAdded) {
  enum { none, beside, alone };
  for (const int64_t cols : {24, 256, 512, 1024})
    for (const int more : {none, beside, alone})
      for (const int factors : {0, 1, 2}) {  // none; a frozen; a and b with their gradients
        SCOPED_TRACE(::testing::Message() << cols << " columns, more " << more << ", factors " << factors);
        const Shape all{11, cols}, channels{cols};
        const DType type = DType::bf16;
        Pair dy(type, all, 1), m(type, all, 2), dsum(type, all, 3), further(type, all, 4), dx(type, all, 5),
            x(type, all, 6), x0(type, all, 7), dx0(type, all, 8), spare(type, all, 9);
        Pair a(DType::f32, channels, 10), b(DType::f32, channels, 11), da(DType::f32, channels, 12),
            db(DType::f32, channels, 13), rstd(DType::f32, {11}, 14);
        Buffer work(DType::u8, {residual_workspace_bytes(11, cols, {Device::cuda, 0})});
        const auto call = [&](auto&& of) {
          ResidualNormBackward g{.dy = of(dy), .m = of(m), .rstd = of(rstd), .dx = of(dx), .workspace = work};
          g.eps = 1e-3, g.norm_scale = 0.7;
          if (more != alone) g.dsum = of(dsum);
          if (more == beside) g.more = of(further);
          if (more == alone) g.more = of(dx), g.spare = of(spare);
          if (factors > 0) g.a = of(a);
          if (factors == 2) g.x = of(x), g.x0 = of(x0), g.b = of(b), g.dx0 = of(dx0), g.da = of(da), g.db = of(db);
          return g;
        };
        if (factors == 2) {  // the kernel forms m from x and x0
          for (size_t i = 0; i < size_t(11 * cols); ++i) {
            const size_t c = i % size_t(cols);
            const double mixed = a.exact.tensor().ptr<double>()[c] * double(x.exact.tensor().ptr<double>()[i]) +
                                 b.exact.tensor().ptr<double>()[c] * double(x0.exact.tensor().ptr<double>()[i]);
            m.rounded.tensor().ptr<bf16>()[i] = bf16(float(mixed));
            m.exact.tensor().ptr<double>()[i] = double(float(bf16(float(mixed))));
          }
        }
        ASSERT_TRUE(cuda::residual_norm_backward(call([](const Pair& p) { return p.rounded.tensor(); }), {}));
        residual_norm_backward(call([](const Pair& p) { return p.exact.tensor(); }), {});
        const double u = testing::roundoff(type);
        // Terms below 20, rounded up to twice, and the sum.
        testing::expect_close(dx.rounded, values(dx.exact), 40 * u, u);
        if (factors < 2) continue;
        testing::expect_close(dx0.rounded, values(dx0.exact), 40 * u, u);
        testing::expect_close(da.rounded, values(da.exact), 160 * u * std::sqrt(11.), 1e-5);
        testing::expect_close(db.rounded, values(db.exact), 160 * u * std::sqrt(11.), 1e-5);
      }
}

}  // namespace
}  // namespace ingot
