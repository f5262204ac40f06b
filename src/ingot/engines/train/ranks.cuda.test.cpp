// Compares data parallel training on two and four GPUs of one process with a single GPU that makes the same passes.
#include <gtest/gtest.h>

#include "ingot/core/comm/ranks.test.h"
#include "ingot/engines/train/optimizer/shards.h"
#include "ingot/engines/train/run/small_run.test.h"
#include "ingot/gpu/device.h"
#include "ingot/gpu/nccl.h"
#include "ingot/kernels/copy/host_copy.h"

namespace ingot {
namespace {

using testing::data_for;
using testing::small_run;
using testing::TemporaryDirectory;

struct Course {
  std::vector<double> losses, norms;
  uint64_t weights = 0;
  std::string hash;
};
Course train(RunConfig c, const TemporaryDirectory& dir, int device, Communicator* ranks) {
  const gpu::DeviceGuard guard(device);
  Course course;
  RunData data = data_for(c, dir);
  Trainer trainer(c, std::move(data), "", "", {}, {Device::cuda, device}, ranks);
  const TrainResult r = trainer.run({.on_step = [&](const TrainStatus& s) {
    course.losses.push_back(s.loss);
    course.norms.push_back(s.grad_norm);
  }});
  course.weights = hash_of_bits(HostCopy(trainer.weights(), {}).tensor());
  course.hash = r.parameter_hash;
  return course;
}

// One pass for each of `world` GPUs.
RunConfig run_of(bool golf, int world) {
  RunConfig c = small_run(golf);
  c.train.steps = 40;
  c.train.accumulation = world;
  c.train.optimizer.clip = 0;   // the f64 sum of its norm is added in another order
  c.train.cuda_graphs = false;  // threads of a process would record at once
  return c;
}
std::vector<Course> train_shared(const RunConfig& c, const TemporaryDirectory& dir, int world) {
  std::vector<Course> shared(static_cast<size_t>(world));
  const std::vector<std::string> errors = testing::run_ranks(world, 60, [&](SocketCommunicator& sockets) {
    const gpu::DeviceGuard guard(sockets.rank());
    gpu::NcclCommunicator ranks(sockets, sockets.rank());
    shared[size_t(sockets.rank())] = train(c, dir, sockets.rank(), &ranks);
  });
  for (const std::string& e : errors) EXPECT_EQ(e, "");
  return shared;
}
// The reason why `world` GPUs cannot train together, in a line.
std::string unsupported_reason(int world) {
  const int found = gpu::device_count();
  if (found < world) return "found " + std::to_string(found) + " GPUs, expected at least " + std::to_string(world);
  return gpu::nccl_available() ? "" : gpu::nccl_version();
}

// A sum of two numbers has a single order, so two ranks of one pass each compute the same as a GPU with both passes.
TEST(RanksCuda, TwoGpusTrainAsOneBitForBit) {
  if (const std::string why = unsupported_reason(2); !why.empty()) GTEST_SKIP() << why;
  for (const bool golf : {true, false}) {
    TemporaryDirectory dir;
    const RunConfig c = run_of(golf, 2);
    const Course alone = train(c, dir, 0, nullptr);
    for (const Course& s : train_shared(c, dir, 2)) {
      EXPECT_EQ(s.losses, alone.losses);
      EXPECT_EQ(s.weights, alone.weights);
      EXPECT_EQ(s.hash, alone.hash);
    }
  }
}

// NCCL adds four numbers in its own order, the same in every run. A gradient's sum in either order is within 3 * 2^-24
// of its terms' sizes of the exact sum. Before the first step nothing differs, so in this step the gradient's norm
// differs from a single GPU's by at most 6 * 2^-24 of the sum of the passes' norms, each at most a few times the
// mean's: 16 is generous here, and far below the effect of a lost or doubled pass (engines/train/ranks.test.cpp).
TEST(RanksCuda, FourGpusDifferFromOneByTheOrderOfSumsAndRepeatBitForBit) {
  if (const std::string why = unsupported_reason(4); !why.empty()) GTEST_SKIP() << why;
  for (const bool golf : {true, false}) {
    TemporaryDirectory dir;
    const RunConfig c = run_of(golf, 4);
    const Course alone = train(c, dir, 0, nullptr);
    const std::vector<Course> shared = train_shared(c, dir, 4), again = train_shared(c, dir, 4);
    for (const auto* run : {&shared, &again})
      for (const Course& s : *run) {
        EXPECT_EQ(s.losses, shared[0].losses);
        EXPECT_EQ(s.weights, shared[0].weights);
        EXPECT_EQ(s.hash, shared[0].hash);
      }
    EXPECT_EQ(shared[0].losses.at(0), alone.losses.at(0));  // passes' losses are added in their order
    EXPECT_NEAR(shared[0].norms.at(0), alone.norms.at(0), 16 * 6 * 0x1p-24 * alone.norms.at(0));
    EXPECT_LT(shared[0].losses.back(), 0.9 * shared[0].losses.front());
  }
}

}  // namespace
}  // namespace ingot
