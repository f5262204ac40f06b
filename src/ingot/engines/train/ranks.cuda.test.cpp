// Data parallel training on two GPUs of one process, against one GPU with the same passes.
#include <gtest/gtest.h>

#include "ingot/core/ranks.test.h"
#include "ingot/engines/train/shards.h"
#include "ingot/engines/train/small_run.test.h"
#include "ingot/gpu/device.h"
#include "ingot/gpu/nccl.h"
#include "ingot/kernels/copy/host_copy.h"

namespace ingot {
namespace {

using testing::data_for;
using testing::small_run;
using testing::TemporaryDirectory;

struct Course {
  std::vector<double> losses;
  uint64_t weights = 0;
  std::string hash;
};
Course train(RunConfig c, const TemporaryDirectory& dir, int device, Communicator* ranks) {
  const gpu::DeviceGuard guard(device);
  Course course;
  RunData data = data_for(c, dir);
  Trainer trainer(c, std::move(data), "", "", {}, {Device::cuda, device}, ranks);
  const TrainResult r = trainer.run({.on_step = [&](const TrainStatus& s) { course.losses.push_back(s.loss); }});
  course.weights = hash_of_bits(HostCopy(trainer.weights(), {}).tensor());
  course.hash = r.parameter_hash;
  return course;
}

// A sum of two numbers has one order, so two ranks of one pass each compute what one GPU does with both passes.
TEST(RanksCuda, TwoGpusTrainAsOneBitForBit) {
  if (gpu::device_count() < 2) GTEST_SKIP() << "found " << gpu::device_count() << " GPUs, expected at least 2";
  if (!gpu::nccl_available()) GTEST_SKIP() << gpu::nccl_version();
  for (const bool golf : {true, false}) {
    TemporaryDirectory dir;
    RunConfig c = small_run(golf);
    c.train.steps = 40;
    c.train.accumulation = 2;
    c.train.optimizer.clip = 0;   // its norm's f64 sum has another order
    c.train.cuda_graphs = false;  // two threads of one process would record at once
    const Course alone = train(c, dir, 0, nullptr);
    Course shared[2];
    const std::vector<std::string> errors = testing::run_ranks(2, 60, [&](SocketCommunicator& sockets) {
      const gpu::DeviceGuard guard(sockets.rank());
      gpu::NcclCommunicator ranks(sockets, sockets.rank());
      shared[sockets.rank()] = train(c, dir, sockets.rank(), &ranks);
    });
    for (const std::string& e : errors) EXPECT_EQ(e, "");
    for (const Course& s : shared) {
      EXPECT_EQ(s.losses, alone.losses);
      EXPECT_EQ(s.weights, alone.weights);
      EXPECT_EQ(s.hash, alone.hash);
    }
  }
}

}  // namespace
}  // namespace ingot
