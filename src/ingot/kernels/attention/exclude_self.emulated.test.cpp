// The CUDA kernels of exclusive self attention on the CPU, against the fp64 loop, where sanitizers see their accesses.
#include <gtest/gtest.h>

#include "ingot/kernels/attention/attention.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace cuda {
void exclude_self(const ExcludeSelf& a, Stream stream);
void exclude_self_backward(const ExcludeSelfBackward& a, Stream stream);
}  // namespace cuda
namespace {

using testing::Buffer;
using testing::compare;
using testing::roundoff;
using testing::values;

struct Case {
  int64_t tokens, heads, kv_heads, width;
};

Buffer exact(const Tensor& t) {
  Buffer b(DType::f64, t.shape);
  testing::assign(b, values(t));
  return b;
}

// A result is rounded to the type once; before that there are a few dozen roundings of fp32, relative to the terms.
TEST(ExcludeSelfEmulated, AgreesWithTheFp64Loop) {
  for (DType type : {DType::f32, DType::bf16, DType::f16})
    for (const Case& c : {Case{9, 4, 2, 64},
                          {3, 3, 3, 40},
                          {5, 6, 1, 17},
                          {0, 2, 1, 8},
                          {2, 1, 1, 512},
                          {4, 4, 1, 65},
                          {2, 2, 1, 129},
                          {37, 8, 4, 64},
                          {11, 2, 2, 128}})
      for (int64_t gap : {3, 8}) {  // between heads; a gap of 3 keeps heads from being whole vectors
        SCOPED_TRACE(::testing::Message() << type << ' ' << c.tokens << ' ' << c.heads << ' ' << c.width);
        const Shape many{c.tokens, c.heads, c.width}, few{c.tokens, c.kv_heads, c.width};
        Buffer y(type, many, c.width + gap), v(type, few), z(type, many), dz(type, many), dy(type, many), dv(type, few);
        testing::fill_normal(y, 1), testing::fill_normal(v, 2), testing::fill_normal(dz, 3),
            testing::fill_normal(dv, 4);
        Buffer y64 = exact(y), v64 = exact(v), dz64 = exact(dz), dv64 = exact(dv), z64(DType::f64, many),
               dy64(DType::f64, many);
        cuda::exclude_self({.y = y, .v = v, .z = z}, {});
        cuda::exclude_self_backward({.y = y, .v = v, .dz = dz, .dy = dy, .dv = dv}, {});
        exclude_self({.y = y64, .v = v64, .z = z64}, {});
        exclude_self_backward({.y = y64, .v = v64, .dz = dz64, .dy = dy64, .dv = dv64}, {});
        const double u = roundoff(type), sums = 64 * roundoff(DType::f32);
        for (auto [got, want] : {std::pair<const Buffer*, const Buffer*>{&z, &z64}, {&dy, &dy64}, {&dv, &dv64}}) {
          const auto seen = compare(*got, values(*want), sums + (type == DType::f16 ? 1e-7 : 0), 1.01 * u + sums);
          EXPECT_TRUE(seen.ok) << seen.message;
          EXPECT_TRUE(got->guards_intact());
        }
      }
}

}  // namespace
}  // namespace ingot
