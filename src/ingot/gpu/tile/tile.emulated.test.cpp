// The tile headers on the CPU: packing, sums over groups and clusters, grid barriers; and plain arithmetic.
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/tile/descriptor.cuh"
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/gpu/tile/reduce.cuh"
#include "ingot/gpu/tile/ring.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/gpu/tile/vec.cuh"

namespace ingot {
namespace {

using tile::Swizzle;

TEST(Swizzle, IsAPermutationThatSpreadsColumnsOfChunksOverAllBanks) {
  for (Swizzle s : {Swizzle::none, Swizzle::b32, Swizzle::b64, Swizzle::b128}) {
    const uint32_t width = tile::row_bytes(s), rows = 1024 / width;
    std::set<uint32_t> seen;
    for (uint32_t i = 0; i < 1024; ++i) {
      seen.insert(tile::swizzled(s, i));
      EXPECT_EQ(tile::swizzled(s, i) / width, i / width) << "bytes stay in their row";
      EXPECT_EQ(tile::swizzled(s, i) % 16, i % 16) << "chunks stay whole";
    }
    EXPECT_EQ(seen.size(), 1024u);
    // Eight rows read by a tensor core at once, a chunk each, must not share a bank.
    for (uint32_t row = 0; row + 8 <= rows; row += 8)
      for (uint32_t chunk = 0; chunk < width / 16; ++chunk) {
        std::set<uint32_t> banks;
        for (uint32_t r = 0; r < 8; ++r) banks.insert(tile::swizzled(s, (row + r) * width + chunk * 16) % 128);
        EXPECT_EQ(banks.size(), 8u) << int(s) << " row " << row << " chunk " << chunk;
      }
  }
  EXPECT_EQ(tile::swizzled<Swizzle::b128>(5, 0x20), tile::swizzled(Swizzle::b128, 5 * 128 + 0x20));
}

TEST(Descriptor, PutsItsFieldsWhereTheManualSays) {
  const uint64_t d = tile::make_descriptor(0x12340, 0x2000, 0x400, Swizzle::b128);
  EXPECT_EQ(d & 0x3fff, 0x1234u);
  EXPECT_EQ(d >> 16 & 0x3fff, 0x200u);
  EXPECT_EQ(d >> 32 & 0x3fff, 0x40u);
  EXPECT_EQ(d >> 49 & 7, 0u);
  EXPECT_EQ(d >> 62, 1u);
  EXPECT_EQ(tile::make_descriptor(0, 0, 0, Swizzle::b64) >> 62, 2u);
  EXPECT_EQ(tile::make_descriptor(0, 0, 0, Swizzle::b32) >> 62, 3u);
  EXPECT_EQ(tile::make_descriptor(0, 0, 0, Swizzle::none) >> 62, 0u);
  // Steps of 16 k: inside a panel, into the next panel, and down the rows of an MN-major panel.
  using ptx::Major;
  EXPECT_EQ((tile::descriptor_step<Major::k, Swizzle::b128>(48)), 6u);
  EXPECT_EQ((tile::descriptor_step<Major::k, Swizzle::b128>(80, 8192)), 512u + 2u);
  EXPECT_EQ((tile::descriptor_step<Major::mn, Swizzle::b128>(32)), 256u);
}

TEST(Ring, GivesStageAndPhaseFromOneCounter) {
  tile::RingCursor<3> one, jumping;
  for (uint32_t i = 0; i < 20; ++i) {
    EXPECT_EQ(tile::Ring<3>::stage(i), i % 3);
    EXPECT_EQ(tile::Ring<3>::phase(i), i / 3 % 2);
    EXPECT_EQ(one.stage, i % 3);
    EXPECT_EQ(one.phase, i / 3 % 2);
    one.advance();
  }
  uint32_t at = 0;
  for (uint32_t fills : {1u, 2u, 3u, 4u, 7u, 5u}) {
    jumping.advance(fills);
    at += fills;
    EXPECT_EQ(jumping.stage, tile::Ring<3>::stage(at));
    EXPECT_EQ(jumping.phase, tile::Ring<3>::phase(at));
  }
}

template <class T, int N> void check_vectors() {
  alignas(16) T from[N], to[N];
  for (int i = 0; i < N; ++i) from[i] = T(float(i) - 2.5f);
  emulation::run("vectors", {}, [&] {
    for (bool evict_first : {false, true}) {
      tile::Vec<T, N> a, b;
      tile::load_streaming(a, from);
      tile::load(b, from);
      float x[N], y[N];
      tile::to_float(a, x);
      tile::to_float(b, y);
      for (int i = 0; i < N; ++i) {
        EXPECT_EQ(x[i], float(i) - 2.5f);
        EXPECT_EQ(y[i], x[i]);
        x[i] *= 2;
      }
      tile::store(to, tile::from_float<T, N>(x), evict_first);
      for (int i = 0; i < N; ++i) EXPECT_EQ(float(to[i]), 2 * float(from[i]));
    }
    EXPECT_EQ(tile::to_float(from[0]), -2.5f);
    EXPECT_EQ(float(tile::from_float<T>(1.5f)), 1.5f);
  });
}
TEST(Vec, MovesAndConvertsElements) {
  check_vectors<float, 4>();
  check_vectors<float, 8>();
  check_vectors<bf16, 8>();
  check_vectors<bf16, 2>();
  check_vectors<f16, 8>();
  check_vectors<f16, 16>();
}

TEST(Reduce, SumsOverGroupsOfEveryWidth) {
  constexpr uint32_t kThreads = 128;
  for (uint32_t width = 1; width <= kThreads; width *= 2)
    emulation::run("group_sum", {.grid = 2, .block = kThreads}, [&] {
      auto& memory = tile::shared<tile::GroupSumMemory<2, int(kThreads)>>();
      const float mine = float(threadIdx.x + 1);
      float v[2] = {mine, -2 * mine};
      tile::group_sum(v, width, memory);
      const float first = float(threadIdx.x / width * width + 1), sum = float(width) * (first + (float(width) - 1) / 2);
      EXPECT_EQ(v[0], sum) << width;
      EXPECT_EQ(v[1], -2 * sum) << width;
    });
}

TEST(Reduce, SumsOverClusters) {
  for (int blocks : {1, 2, 4, 8})
    emulation::run("cluster_sum", {.grid = 2 * blocks, .block = 32, .cluster = blocks}, [&] {
      auto& memory = tile::shared<tile::ClusterSumMemory>();
      ptx::cluster_arrive();
      const float sum = tile::cluster_sum(float(blockIdx.x), uint32_t(blocks), memory);
      const int first = int(blockIdx.x) / blocks * blocks;
      EXPECT_EQ(sum, float(blocks * first + blocks * (blocks - 1) / 2));
    });
}

struct Control {
  uint32_t stop = gpu::kRunning, host_stop = 0;
  gpu::WaitRecord record;
  gpu::Watch watch() { return {.stop = &stop, .host_stop = &host_stop, .record = &record, .limit_ns = 10'000'000}; }
};

// Every round each block publishes a number and reads the number of a second block.
void rounds(uint32_t* words, uint32_t* counter, const gpu::Watch& watch) {
  for (uint32_t r = 1; r <= 3; ++r) {
    if (threadIdx.x == 5) words[blockIdx.x] = r * 1000 + blockIdx.x;
    if (!tile::grid_barrier(counter, watch, r)) return;
    const uint32_t other = (blockIdx.x + r) % gridDim.x;
    EXPECT_EQ(words[other], r * 1000 + other);
    if (!tile::grid_barrier(counter, watch, 10 + r)) return;
  }
}

TEST(Flag, GridBarrierHoldsAtEverySizeAndOrderWithOneCounter) {
  uint32_t counter = 0;
  for (int64_t grid : {1, 2, 7, 30})
    for (uint64_t seed : {1, 2, 3}) {
      Control control;
      std::vector<uint32_t> words(size_t(grid), 0);
      emulation::settings().seed = seed;
      emulation::run("rounds", {.grid = grid, .block = 32, .cooperative = true},
                     [&] { rounds(words.data(), &counter, control.watch()); });
      EXPECT_EQ(control.stop, gpu::kRunning);
    }
  emulation::settings().seed = 1;
}

TEST(Flag, BlocksThatDoNotRunTogetherTimeOutAndNameTheAwaitedValue) {
  Control control;
  std::vector<uint32_t> words(4, 0);
  uint32_t counter = 0;
  emulation::run("rounds", {.grid = 4, .block = 32}, [&] { rounds(words.data(), &counter, control.watch()); });
  EXPECT_EQ(control.stop, gpu::kTimedOut);
  EXPECT_EQ(control.record.state, gpu::kTimedOut);
  EXPECT_EQ(control.record.what, 1u);
  EXPECT_GE(control.record.waited_ns, 10'000'000u);
}

TEST(Flag, WaitsEndWhenTheHostAsks) {
  Control control;
  control.host_stop = 1;
  uint32_t flag = 3, ok = 7;
  gpu::Watch watch = control.watch();
  watch.limit_ns = uint64_t(1) << 60;
  emulation::run("wait", {}, [&] { ok = tile::wait_at_least(&flag, 4, watch, 9); });
  EXPECT_EQ(ok, 0u);
  EXPECT_EQ(control.record.state, gpu::kStoppedByHost);
  EXPECT_EQ(control.record.seen, 3u);
  EXPECT_EQ(control.record.expected, 4u);
  EXPECT_TRUE(tile::reached(2, 0xfffffffe)) << "counters may wrap around";
  EXPECT_FALSE(tile::reached(0xfffffffe, 2));
}

}  // namespace
}  // namespace ingot
