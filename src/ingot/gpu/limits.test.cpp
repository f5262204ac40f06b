#include "ingot/gpu/limits.h"

#include <gtest/gtest.h>

#include "ingot/testing/testing.h"

namespace ingot::gpu {
namespace {

TEST(Limits, OfAnImitatedGpuNeverExceedTheRealLimits) {
  const Limits h200 = limits_of("9.0");
  for (const char* capability : {"8.0", "8.6", "8.9", "10.0", "12.0"}) {
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
    limits_of("7.5");
    FAIL() << "expected an error";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("found '7.5', expected one of 8.0, 8.6, 8.9, 9.0, 10.0, 12.0"),
              std::string::npos)
        << e.what();
  }
}

}  // namespace
}  // namespace ingot::gpu
