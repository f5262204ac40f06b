// Training on a GPU learns as well as on the CPU, repeats bit for bit, and resumes at the same place.
#include <gtest/gtest.h>

#include "ingot/engines/train/run/small_run.test.h"
#include "ingot/kernels/copy/host_copy.h"
#include "ingot/testing/emulated_limits.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using testing::data_for;
using testing::small_run;
using testing::TemporaryDirectory;

const Device kGpu{Device::cuda, 0};

class TrainerCuda : public testing::GpuTest<> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (testing::kEmulated) GTEST_SKIP() << "too much for the emulator";
  }
};

struct Curve {
  std::vector<double> loss, grad_norm;
  TrainResult result;
  int64_t replays = 0;
};
Curve train(RunConfig c, const std::string& directory, const TemporaryDirectory& dir, Device device, int64_t stop = 0) {
  Curve curve;
  Trainer trainer(c, data_for(c, dir), directory, {}, {}, device);
  int64_t done = trainer.step();
  curve.result = trainer.run({.on_step =
                                  [&](const TrainStatus& s) {
                                    curve.loss.push_back(s.loss), curve.grad_norm.push_back(s.grad_norm);
                                    done = s.step;
                                  },
                              .should_stop = [&] { return stop > 0 && done >= stop; }});
  curve.replays = trainer.replayed_passes();
  return curve;
}

#ifdef INGOT_EMULATED_DEVICE
// Three steps of a tiny model with the limits of other GPUs than Hopper, beside the CPU.
class TrainerOnAmpereCuda : public testing::GpuTest<::testing::TestWithParam<const char*>> {
 protected:
  const testing::EmulatedLimits limits_{GetParam()};
};
TEST_P(TrainerOnAmpereCuda, StepsEqualTheCpusUpToRoundings) {
  TemporaryDirectory dir;
  RunConfig c = small_run();
  c.model.layers = 2, c.model.xsa_layers = 2, c.model.lane_start = 1;
  c.model.loop_first = c.model.loop_last = 0, c.model.loop_extra = 0;
  c.train.steps = 3;
  c.train.tokenizer = "bpe", c.model.vocab = 264;  // rows of whole 16 bytes, as there is no cuBLASLt
  c.train.held_out_tail = 0.02;
  const Curve cpu = train(c, "", dir, {}), gpu = train(c, "", dir, kGpu);
  ASSERT_EQ(gpu.loss.size(), 3u);
  EXPECT_NEAR(gpu.loss[0], cpu.loss[0], 0.02 * cpu.loss[0]);  // the same weights up to a rounding to bf16
  EXPECT_NEAR(gpu.grad_norm[0], cpu.grad_norm[0], 0.05 * cpu.grad_norm[0]);
  EXPECT_LT(gpu.loss[2], gpu.loss[0]);
  EXPECT_NEAR(gpu.loss[2], cpu.loss[2], 0.05 * cpu.loss[2]);
}
INSTANTIATE_TEST_SUITE_P(, TrainerOnAmpereCuda, ::testing::Values("8.0", "8.6", "8.9", "10.0", "12.0"));
#endif

TEST_F(TrainerCuda, LearnsAsOnTheCpu) {
  for (bool golf : {true, false}) {
    TemporaryDirectory dir;
    RunConfig c = small_run(golf);
    c.train.steps = 60;
    c.train.accumulation = 2;
    const Curve cpu = train(c, "", dir, {}), gpu = train(c, "", dir, kGpu);
    // The first step sees the same weights up to a rounding to bf16; later steps drift as much as with different seeds.
    EXPECT_NEAR(gpu.loss[0], cpu.loss[0], 0.02 * cpu.loss[0]);
    EXPECT_NEAR(gpu.grad_norm[0], cpu.grad_norm[0], 0.05 * cpu.grad_norm[0]);
    EXPECT_LT(gpu.result.status.loss, 0.75 * gpu.loss[0]);
    EXPECT_NEAR(gpu.result.score.loss, cpu.result.score.loss, 0.1 * cpu.result.score.loss);
    std::printf("%s: first loss %.4f (CPU %.4f), held out %.4f (CPU %.4f)\n", golf ? "golf" : "nano", gpu.loss[0],
                cpu.loss[0], gpu.result.score.loss, cpu.result.score.loss);
  }
}

TEST_F(TrainerCuda, AResumedRunEndsWithTheSameBits) {
  std::string hashes[2];
  for (bool interrupted : {false, true}) {
    TemporaryDirectory dir;
    const RunConfig c = small_run();
    const std::string run = dir.path() + "/run";
    if (interrupted)
      for (int64_t stop : {5, 9}) EXPECT_EQ(int(train(c, run, dir, kGpu, stop).result.end), int(TrainEnd::stopped));
    hashes[interrupted] = train(c, run, dir, kGpu).result.parameter_hash;
  }
  EXPECT_EQ(hashes[0], hashes[1]);
}

// With several buckets of segments, several passes a step, and recurrence from halfway on.
TEST_F(TrainerCuda, GraphsAndKeptActivationsChangeNoBit) {
  for (bool golf : {true, false}) {
    TemporaryDirectory dir;
    RunConfig c = small_run(golf);
    c.train.order = "shuffled";
    c.train.accumulation = 2;
    c.train.steps = 24;
    Curve with = train(c, "", dir, kGpu);
    c.train.cuda_graphs = false;
    const Curve without = train(c, "", dir, kGpu);
    c.train.keep_activations = false;
    const Curve formed_again = train(c, "", dir, kGpu);
    for (const Curve* other : {&without, &formed_again}) {
      EXPECT_EQ(with.loss, other->loss);
      EXPECT_EQ(with.grad_norm, other->grad_norm);
      EXPECT_EQ(with.result.parameter_hash, other->result.parameter_hash);
    }
    EXPECT_GE(with.replays, 24);  // of 48 passes
    EXPECT_EQ(without.replays, 0);
  }
}

TEST_F(TrainerCuda, ABatchThatDoesNotFitIsRefusedWithASizeThatFits) {
  TemporaryDirectory dir;
  RunConfig c = small_run();
  c.train.batch_tokens = int64_t(1) << 27;
  try {
    train(c, "", dir, kGpu);
    FAIL() << "no error";
  } catch (const Error& e) {
    const std::string said = e.what();
    EXPECT_EQ(said.find("training on 134217728 tokens at once needs "), 0u) << said;
    EXPECT_NE(said.find(" of memory on cuda:0, found "), std::string::npos) << said;
    EXPECT_NE(said.find(" available, expected train.batch_tokens of at most "), std::string::npos) << said;
  }
}

TEST_F(TrainerCuda, ARunContinuesOnTheOtherDevice) {
  TemporaryDirectory dir;
  RunConfig c = small_run();
  const std::string run = dir.path() + "/run";
  train(c, run, dir, {}, 5);
  const Curve on_gpu = train(c, run, dir, kGpu, 9);
  EXPECT_EQ(on_gpu.loss.size(), 4u);
  const Curve back = train(c, run, dir, {});
  EXPECT_EQ(int(back.result.end), int(TrainEnd::finished));
  EXPECT_EQ(back.loss.size(), 3u);
}

}  // namespace
}  // namespace ingot
