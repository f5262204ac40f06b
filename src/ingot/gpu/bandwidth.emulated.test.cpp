// The bandwidth kernels, with their launcher, in emulation.
#include "ingot/gpu/bandwidth.h"

#include <gtest/gtest.h>

#include <vector>

namespace ingot {
namespace {

TEST(BandwidthEmulated, CopiesEveryByteOnceAndNoMore) {
  for (size_t words : {4u, 1020u, 4096u, 4100u, 9000u}) {
    std::vector<uint32_t> from(words), to(words, 0);
    for (size_t i = 0; i < words; ++i) from[i] = uint32_t(i + 1);
    gpu::copy_kernel(to.data(), from.data(), int64_t(words * 4), {});
    EXPECT_EQ(to, from);
  }
}

TEST(BandwidthEmulated, ReadsInsideTheBuffer) {
  std::vector<uint32_t> from(40000, 1);
  uint32_t sink = 5;
  gpu::read_kernel(from.data(), int64_t(from.size() * 4), &sink, {});
  EXPECT_EQ(sink, 5u);
}

}  // namespace
}  // namespace ingot
