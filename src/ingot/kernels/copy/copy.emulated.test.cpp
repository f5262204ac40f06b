// The CUDA kernels of copy and fill and their launcher on the CPU, where sanitizers see their accesses.
#include "ingot/kernels/copy/copy.h"

#include <gtest/gtest.h>

#include "ingot/kernels/copy/copy_cases.test.h"

namespace ingot {
namespace cuda {
void copy(const Copy& c, Stream stream);
void fill(const Fill& f, uint64_t pattern, Stream stream);
}  // namespace cuda
namespace {

using testing::Buffer;
using testing::values;

TEST(CopyEmulated, MovesAndConvertsEveryElementOnce) {
  for (DType s : kFloats)
    for (DType d : kFloats)
      for (const CopyCase& c : kCopyCases) {
        Buffer from(s, {c.rows, c.cols}, c.cols + c.gap_from), to(d, {c.rows, c.cols}, c.cols + c.gap_to);
        testing::fill_normal(from, 1, 3);
        cuda::copy({.from = from, .to = to}, {});
        auto want = values(from);
        for (double& x : want) x = rounded(x, d);
        EXPECT_EQ(values(to), want) << s << " to " << d << ' ' << c.rows << 'x' << c.cols;
        EXPECT_TRUE(from.guards_intact() && to.guards_intact());
      }
}

TEST(CopyEmulated, MovesAndFillsSlicesThatLieApart) {
  copies_and_fills_slices<Buffer>([](const Copy& c) { cuda::copy(c, {}); },
                                  [](const Fill& f) {
                                    const bool narrow = f.to.dtype == DType::bf16;
                                    cuda::fill(f, narrow ? 0x4000u : 0x40000000u, {});
                                  });
}

TEST(CopyEmulated, FillsEveryElement) {
  const uint64_t two[] = {0x4000000000000000u, 0x40000000u, 0x4000u};  // 2.0 in f64, f32, bf16
  for (const CopyCase& c : kCopyCases)
    for (int t = 0; t < 3; ++t) {
      Buffer to(kFloats[t], {c.rows, c.cols}, c.cols + c.gap_to);
      cuda::fill({.to = to}, two[t], {});
      EXPECT_EQ(values(to), std::vector<double>(size_t(c.rows * c.cols), 2.0)) << kFloats[t];
      EXPECT_TRUE(to.guards_intact());
    }
}

}  // namespace
}  // namespace ingot
