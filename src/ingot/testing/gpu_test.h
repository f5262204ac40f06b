#pragma once
// The fixture of tests on a GPU: skipped where there is no GPU. `Base` makes the fixture parameterised.
#include <gtest/gtest.h>

#include "ingot/gpu/device.h"

namespace ingot::testing {

// Whether the GPU is the emulator, 10,000 times as slow: tests of full size skip there.
#ifdef INGOT_EMULATED_DEVICE
constexpr bool kEmulated = true;
#else
constexpr bool kEmulated = false;
#endif

template <class Base = ::testing::Test> class GpuTest : public Base {
 protected:
  void SetUp() override {
    if (gpu::device_count() == 0) GTEST_SKIP() << "no GPU";
  }
};

}  // namespace ingot::testing
