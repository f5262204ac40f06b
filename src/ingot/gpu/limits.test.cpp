#include "ingot/gpu/limits.h"

#include <gtest/gtest.h>

#include "ingot/gpu/gemm/shape.h"
#include "ingot/gpu/generation.h"
#include "ingot/gpu/l2.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"

namespace ingot::gpu {
namespace {

TEST(Limits, OfAnImitatedGpuNeverExceedTheRealLimits) {
  const Limits h200 = limits_of("9.0");
  for (const char* capability : {"7.5", "8.0", "8.6", "8.9", "10.0", "12.0"}) {
    const Limits wanted = limits_of(capability), l = imitate(h200, wanted);
    EXPECT_EQ(l.capability, wanted.capability) << capability;
    EXPECT_FALSE(l.hopper) << capability;
    EXPECT_LE(l.sms, h200.sms) << capability;
    EXPECT_LE(l.sms, wanted.sms) << capability;
    EXPECT_LE(l.smem_per_block, wanted.smem_per_block) << capability;
    EXPECT_LE(l.threads_per_sm, wanted.threads_per_sm) << capability;
    EXPECT_LE(l.l2_bytes, h200.l2_bytes) << capability;
  }
  EXPECT_EQ(imitate(h200, h200), h200);
  Limits by_ptx = h200;
  by_ptx.hopper = false;
  EXPECT_FALSE(imitate(by_ptx, h200).hopper) << "code that is not loaded cannot be imitated";
}

TEST(Limits, OfAnUnknownComputeCapabilityAreRefusedByName) {
  try {
    limits_of("7.0");
    FAIL() << "expected an error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("found '7.0', expected one of 7.5, 8.0, 8.6, 8.9, 9.0, 10.0, 12.0"),
              std::string::npos)
        << e.what();
  }
}

// Measured on Hopper, whose GPUs report 50 or 60 MB of L2; the L2 of an RTX 3090 and of a T4 is much smaller.
TEST(Limits, SizesRelativeToL2FollowTheGpu) {
  constexpr int64_t kMiB = 1 << 20;
  for (int64_t l2 : {50 * kMiB, 60 * kMiB}) {
    Limits hopper = limits_of("9.0");
    hopper.l2_bytes = l2;
    EXPECT_EQ(beyond_l2_bytes(hopper), 64 * kMiB);
    EXPECT_EQ(half_l2_bytes(hopper), 25 * kMiB);
    EXPECT_EQ(kept_in_l2_bytes(hopper), 24 * kMiB);
  }
  for (const char* capability : {"7.5", "8.0", "8.6", "8.9", "10.0", "12.0"}) {
    const Limits l = limits_of(capability);
    EXPECT_GT(beyond_l2_bytes(l), l.l2_bytes) << capability;
    EXPECT_EQ(half_l2_bytes(l), l.l2_bytes / 2) << capability;
    EXPECT_LE(kept_in_l2_bytes(l), l.l2_bytes / 2) << capability;
  }
}

// Kernels that only Hopper runs state the shared memory of a block as a constant: the size of their arrays depends on
// it.
TEST(Limits, HoppersMatrixKernelsTakeTheSharedMemoryOfABlock) {
  EXPECT_EQ(gemm::kSharedBytes, limits_of("9.0").smem_per_block);
}

TEST(Limits, AGpuBelow80IsRefusedInOneLine) {
  for (const char* capability : {"8.0", "8.6", "8.9", "9.0", "10.0", "12.0"})
    check_generation("op", limits_of(capability));
  EXPECT_EQ(testing::error_of([] { check_generation("op", limits_of("7.5")); }),
            "unsupported: op: found a GPU of compute capability 7.5, expected 8.0 or later");
}

}  // namespace
}  // namespace ingot::gpu
