// Bounded waits: their results and records, and the GPU's state afterwards.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/testing/device_array.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using gpu::WaitControl;
using gpu::Watch;
using testing::DeviceArray;

class FlagCuda : public testing::GpuTest<> {};

// Block b waits until b words are written, writes the next word, and raises the flag.
__global__ void relay(uint32_t* words, uint32_t* flag, Watch watch, uint32_t skip) {
  __shared__ uint32_t ok;
  const uint32_t b = gridDim.x - 1 - blockIdx.x;  // the last block goes first
  if (threadIdx.x == 0) ok = tile::wait_at_least(flag, b, watch, 1);
  __syncthreads();
  if (ok && threadIdx.x < 32) words[b * 32 + threadIdx.x] = (b == 0 ? 0 : words[(b - 1) * 32 + threadIdx.x]) + 1;
  __syncthreads();
  if (threadIdx.x == 0 && b != skip) tile::flag_raise(flag);
  tile::leave(watch);
}

constexpr uint32_t kBlocks = 24, kNobody = 1000;

void relay_works(WaitControl& control) {
  DeviceArray<uint32_t> words(kBlocks * 32), flag(std::vector<uint32_t>(1));
  gpu::launch("relay", relay, {.grid = kBlocks, .block = 64, .cooperative = true}, {}, words.device(), flag.device(),
              control.watch(), kNobody);
  words.download();
  EXPECT_NO_THROW(control.check("relay"));
  for (uint32_t i = 0; i < kBlocks * 32; ++i) ASSERT_EQ(words.host[i], i / 32 + 1);
}

TEST_F(FlagCuda, HandsDataFromBlockToBlockSmall) {
  WaitControl control;
  relay_works(control);
}

TEST_F(FlagCuda, ATimeoutNamesTheThreadAndTheAwaitedValueAndLeavesTheGpuUsableSmall) {
  WaitControl control(0.05);
  for (int round = 0; round < 3; ++round) {
    DeviceArray<uint32_t> words(kBlocks * 32), flag(std::vector<uint32_t>(1));
    const auto start = std::chrono::steady_clock::now();
    gpu::launch("relay", relay, {.grid = kBlocks, .block = 64, .cooperative = true}, {}, words.device(), flag.device(),
                control.watch(), 5u);  // block 5 of the chain forgets to raise
    EXPECT_NO_THROW(gpu::synchronize());
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
    std::string message;
    try {
      control.check("relay", {"nothing", "words of the block before"});
    } catch (const Error& e) {
      EXPECT_EQ(e.code, ErrorCode::interrupted);
      message = e.what();
    }
    EXPECT_NE(message.find("for words of the block before: found 5, expected "), std::string::npos) << message;
    EXPECT_NE(message.find("timed out"), std::string::npos) << message;
    EXPECT_NE(message.find("relay: block "), std::string::npos) << message;
    flag.download();  // blocks with failed waits ran to their end: all but one raised the flag
    EXPECT_EQ(flag.host[0], kBlocks - 1);
    control.reset({});
    relay_works(control);
  }
}

TEST_F(FlagCuda, EndsWhenTheHostAsks) {
  WaitControl control(60);
  DeviceArray<uint32_t> words(kBlocks * 32), flag(std::vector<uint32_t>(1));
  const auto start = std::chrono::steady_clock::now();
  gpu::launch("relay", relay, {.grid = kBlocks, .block = 64, .cooperative = true}, {}, words.device(), flag.device(),
              control.watch(), 0u);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(control.report(), "");
  control.request_stop();
  gpu::synchronize();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  EXPECT_NE(control.report({"nothing", "words"}).find("stopped by the host"), std::string::npos) << control.report();
  control.reset({});
  relay_works(control);
}

// A barrier without arrivals.
__global__ void wait_for_nothing(Watch watch, uint32_t* answers) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    ptx::mbarrier_init(&barrier, 1);
    ptx::fence_mbarrier_init();
  }
  __syncthreads();
  answers[threadIdx.x] = tile::wait(&barrier, 1, watch, 7);
  answers[32 + threadIdx.x] = tile::wait(&barrier, 0, watch, 2);
  answers[64 + threadIdx.x] = tile::wait(&barrier, 0, watch, 3);  // at once, because all waits have given up
  tile::leave(watch);
#endif
}
TEST_F(FlagCuda, BoundsWaitsForBarriersSmall) {
  if (!gpu::current_limits().hopper) GTEST_SKIP() << "waits for barriers that suspend a thread need Hopper";
  WaitControl control(0.02);
  DeviceArray<uint32_t> answers(96);
  gpu::launch("wait_for_nothing", wait_for_nothing, {.grid = 1, .block = 32}, {}, control.watch(), answers.device());
  answers.download();
  for (size_t i = 0; i < 96; ++i) ASSERT_EQ(answers.host[i], i < 32 ? 1u : 0u) << i;
  EXPECT_NE(control.report({"a", "b", "a full stage"}).find("for a full stage"), std::string::npos) << control.report();
  control.reset({});
  relay_works(control);
}

// Every round each block publishes a number and reads the numbers of two further blocks.
__global__ void rounds(uint32_t* words, uint32_t* counter, Watch watch, uint32_t count, uint32_t* wrong) {
  for (uint32_t r = 1; r <= count; ++r) {
    if (threadIdx.x == blockDim.x - 1) words[blockIdx.x] = r * 1000 + blockIdx.x;
    if (!tile::grid_barrier(counter, watch, r)) return;
    const uint32_t other = (blockIdx.x + 1 + r * 7) % gridDim.x;
    if (threadIdx.x == 0 && words[other] != r * 1000 + other) ptx::add_relaxed(wrong, 1);
    if (!tile::grid_barrier(counter, watch, r)) return;
  }
}
TEST_F(FlagCuda, GridBarrierHoldsAtEverySizeWithOneCounter) {
  WaitControl control(5);
  DeviceArray<uint32_t> words(4096), counter(std::vector<uint32_t>(1)), wrong(std::vector<uint32_t>(1));
  const int64_t most = gpu::resident_blocks("rounds", rounds, {.block = 64});
  for (int64_t grid :
       {int64_t(1), int64_t(2), int64_t(3), int64_t(7), int64_t(78), int64_t(131), int64_t(132), int64_t(264), most}) {
    if (grid > most || grid > 4096) continue;
    gpu::launch("rounds", rounds, {.grid = grid, .block = 64, .cooperative = true}, {}, words.device(),
                counter.device(), control.watch(), 50u, wrong.device());
    wrong.download();
    control.check("rounds");
    ASSERT_EQ(wrong.host[0], 0u) << grid;
  }
}
TEST_F(FlagCuda, GridBarrierSmall) {
  WaitControl control(60);
  DeviceArray<uint32_t> words(8), counter(std::vector<uint32_t>(1)), wrong(std::vector<uint32_t>(1));
  gpu::launch("rounds", rounds, {.grid = 5, .block = 64, .cooperative = true}, {}, words.device(), counter.device(),
              control.watch(), 3u, wrong.device());
  wrong.download();
  control.check("rounds");
  EXPECT_EQ(wrong.host[0], 0u);
}

TEST_F(FlagCuda, RefusesACooperativeGridThatCannotRunAtOnce) {
  WaitControl control;
  DeviceArray<uint32_t> words(8), counter(1), wrong(1);
  const int64_t most = gpu::resident_blocks("rounds", rounds, {.block = 64});
  EXPECT_THROW(gpu::launch("rounds", rounds, {.grid = most + 1, .block = 64, .cooperative = true}, {}, words.device(),
                           counter.device(), control.watch(), 1u, wrong.device()),
               Error);
  relay_works(control);  // nothing is left pending
}

}  // namespace
}  // namespace ingot
