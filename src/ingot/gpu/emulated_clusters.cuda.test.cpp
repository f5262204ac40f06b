// The emulator refuses cluster barriers on GPUs without clusters.
#ifdef INGOT_EMULATED_DEVICE
#include <gtest/gtest.h>

#include "ingot/gpu/emulation/grid.h"
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/testing/emulated_limits.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

TEST(EmulatedClustersCuda, AClusterBarrierIsRefusedWhereNoThreadWaits) {
  const auto complaint_as = [](const char* capability) {
    const testing::EmulatedLimits limits(capability);
    return testing::error_of([] {
      emulation::run("kernel", {.grid = 1, .block = 64}, [] {
        ptx::cluster_arrive();
        ptx::cluster_wait();
      });
    });
  };
  EXPECT_EQ(complaint_as("9.0"), "");
  for (const char* capability : {"7.5", "8.0", "12.0"})
    EXPECT_NE(complaint_as(capability).find("found a cluster barrier on a GPU without clusters"), std::string::npos)
        << capability;
}

}  // namespace
}  // namespace ingot
#endif
