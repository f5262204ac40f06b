// The limits of the GPU at hand, which is the emulator in a build with INGOT_CUDA=EMULATED.
#include "ingot/gpu/limits.h"

#include "ingot/testing/emulated_limits.h"
#include "ingot/testing/gpu_test.h"

namespace ingot::gpu {
namespace {

class LimitsCuda : public testing::GpuTest<> {};

// Launchers with one block for each multiprocessor use as many blocks as the imitated GPU has.
TEST_F(LimitsCuda, TheNumberOfMultiprocessorsIsThatOfTheLimits) {
  EXPECT_EQ(sm_count(0), limits(0).sms);
  EXPECT_LE(sm_count(0), device_info(0).sms);
#ifdef INGOT_EMULATED_DEVICE
  Limits fewer = limits(0);
  const int sms = --fewer.sms;
  const testing::EmulatedLimits limited(fewer);
  EXPECT_EQ(sm_count(0), sms);
#endif
}

}  // namespace
}  // namespace ingot::gpu
