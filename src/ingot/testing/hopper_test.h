#pragma once
// The fixture of tests of units that exist for Hopper alone: skipped where the driver does not run the machine code for
// sm_90a, or where INGOT_GPU_AS names another GPU.
#include "ingot/gpu/limits.h"
#include "ingot/testing/gpu_test.h"

namespace ingot::testing {

template <class Base = ::testing::Test> class HopperTest : public GpuTest<Base> {
 protected:
  void SetUp() override {
    GpuTest<Base>::SetUp();
    if (!this->IsSkipped() && !gpu::current_limits().hopper) GTEST_SKIP() << "needs Hopper's machine code";
  }
};

}  // namespace ingot::testing
