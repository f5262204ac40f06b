#include "ingot/gpu/side_streams.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "ingot/gpu/device.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot::gpu {
namespace {

TEST(side_streams, a_cpu_runs_all_tasks_in_order_on_the_stream_given) {
  SideStreams sides({Device::cpu, 0}, 3);
  std::vector<int> ran;
  int stream = 0;
  sides.run(5, {&stream}, [&](int task, Stream on) {
    EXPECT_EQ(on.handle, &stream);
    ran.push_back(task);
  });
  EXPECT_EQ(ran, (std::vector{0, 1, 2, 3, 4}));
  EXPECT_THROW(sides.run(2, {}, [](int, Stream) { throw std::runtime_error("task"); }), std::runtime_error);
}

class SideStreamsCuda : public testing::GpuTest<> {};

// More tasks than streams. Each task overwrites its own part many times, after a fill of everything and before a copy
// of everything on the caller's stream, launched one by one and as a graph.
TEST_F(SideStreamsCuda, TasksLieBetweenEarlierAndLaterWorkOfTheStream) {
  constexpr int kTasks = 6, kTimes = 20;
  constexpr int64_t kPart = 1 << 20;
  const OwnedStream stream;
  SideStreams sides({Device::cuda, 0}, 3);
  testing::DeviceBuffer from(DType::u8, {kTasks, kPart}), to(DType::u8, {kTasks, kPart});
  char* const parts = static_cast<char*>(from.tensor().data);
  const auto work = [&](uint8_t base) {
    fill_bytes(parts, 99, kTasks * kPart, stream);
    sides.run(kTasks, stream, [&](int task, Stream on) {
      for (int i = kTimes; i >= 0; --i) fill_bytes(parts + task * kPart, uint8_t(base + task + i), kPart, on);
    });
    copy_on_device(to.tensor().data, parts, kTasks * kPart, stream);
  };
  const auto expect = [&](uint8_t base) {
    stream.synchronize();
    to.download();
    const uint8_t* const got = to.host().ptr<uint8_t>();
    for (int64_t i = 0; i < kTasks * kPart; i += 4099) ASSERT_EQ(got[i], base + i / kPart) << i;
  };
  work(1);
  expect(1);
  const Graph graph(stream, [&] { work(50); });
  for (int replay = 0; replay < 3; ++replay) graph.launch(stream);
  expect(50);
  EXPECT_THROW(sides.run(2, stream, [](int, Stream) { throw std::runtime_error("task"); }), std::runtime_error);
  work(7);
  expect(7);
}

}  // namespace
}  // namespace ingot::gpu
