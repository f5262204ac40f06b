#include "ingot/gpu/plain_launches.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "ingot/gpu/bandwidth.h"
#include "ingot/gpu/device.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

class PlainLaunchesCuda : public testing::GpuTest<> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (testing::kEmulated) GTEST_SKIP() << "the emulator has no CUDA graphs";
  }
};

TEST_F(PlainLaunchesCuda, KernelsRunInTheirOrderWithTheRecordedArguments) {
  constexpr int64_t kCount = 1 << 16, kBytes = kCount * int64_t(sizeof(int32_t));
  std::vector<int32_t> from(kCount), found(kCount);
  std::iota(from.begin(), from.end(), 1);
  gpu::DeviceMemory memory[4] = {gpu::DeviceMemory(kBytes), gpu::DeviceMemory(kBytes), gpu::DeviceMemory(kBytes),
                                 gpu::DeviceMemory(kBytes)};
  const gpu::OwnedStream stream;
  const gpu::PlainLaunches launches(stream, [&] {
    for (int i = 0; i < 3; ++i) gpu::copy_kernel(memory[i + 1].data(), memory[i].data(), kBytes, stream);
  });
  EXPECT_EQ(launches.count(), 3);
  for (int round = 0; round < 2; ++round) {
    for (int32_t& n : from) n += round;
    gpu::copy_to_device(memory[0].data(), from.data(), kBytes);
    launches.launch(stream);
    stream.synchronize();
    gpu::copy_to_host(found.data(), memory[3].data(), kBytes);
    EXPECT_EQ(found, from);
  }
}

TEST_F(PlainLaunchesCuda, OtherWorkThanKernelsIsRefused) {
  gpu::DeviceMemory memory(1024);
  const gpu::OwnedStream stream;
  EXPECT_THROW(gpu::PlainLaunches(stream, [&] { gpu::fill_bytes(memory.data(), 0, 1024, stream); }), Error);
}

}  // namespace
}  // namespace ingot
