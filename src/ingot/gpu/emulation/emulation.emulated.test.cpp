// Tests of the emulator: threads exchange data, and planted bugs are found and named.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <vector>

#include "ingot/gpu/emulation/order.h"
#include "ingot/gpu/emulation/sanitizers.h"
#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/cp_async.cuh"
#include "ingot/gpu/ptx/ldmatrix.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/ptx/mma.cuh"
#include "ingot/gpu/ptx/stmatrix.cuh"
#include "ingot/gpu/ptx/thread.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

void run(const emulation::Shape& shape, const std::function<void()>& thread) {
  emulation::run("kernel", shape, thread);
}
std::string complaint(const emulation::Shape& shape, const std::function<void()>& thread) {
  try {
    run(shape, thread);
  } catch (const Error& e) { return e.what(); }
  return "";
}

TEST(Emulation, RunsEveryThreadOfEveryBlockOnce) {
  std::vector<int> count(7 * 40);
  run({.grid = 7, .block = 40}, [&] {
    EXPECT_EQ(blockDim.x, 40u);
    EXPECT_EQ(gridDim.x, 7u);
    ++count[blockIdx.x * 40 + threadIdx.x];
  });
  EXPECT_EQ(count, std::vector<int>(7 * 40, 1));
}

TEST(Emulation, OrderFollowsTheSeed) {
  const auto order = [](uint64_t seed) {
    emulation::settings().seed = seed;
    std::vector<uint32_t> seen;
    run({.grid = 3, .block = 20}, [&] {
      const emulation::Silence silence;
      seen.push_back(blockIdx.x * 20 + threadIdx.x);
    });
    emulation::settings().seed = 1;
    return seen;
  };
  EXPECT_EQ(order(5), order(5));
  EXPECT_NE(order(5), order(6));
}

// Sets the order of the launches of its scope.
struct InOrder {
  explicit InOrder(const char* name) { emulation::order() = emulation::order_named(name); }
  ~InOrder() { emulation::order() = before; }
  emulation::Order before = emulation::order();
};

// Warp 1 overwrites a number after a thousand steps of its own, without a barrier behind warp 0's read, which follows
// ten steps. All warps advance alike, so no drawn order shows the missing barrier.
uint32_t read_without_a_barrier() {
  uint32_t read = 0;
  run({.grid = 1, .block = 96}, [&] {
    auto& number = tile::shared<uint32_t>();
    if (threadIdx.x == 64) number = 1;
    __syncthreads();
    for (int i = 0; i < (threadIdx.x / 32 == 1 ? 1000 : 10); ++i) __syncwarp();
    if (threadIdx.x == 0) read = number;
    if (threadIdx.x == 32) number = 2;
  });
  return read;
}

TEST(Emulation, AnOrderWithALateOrAnEarlyWarpShowsAMissingBarrier) {
  {
    const auto drawn = emulation::order();
    emulation::order() = {};
    for (uint64_t seed = 1; seed <= 50; ++seed) {
      emulation::settings().seed = seed;
      EXPECT_EQ(read_without_a_barrier(), 1u) << seed;
    }
    emulation::settings().seed = 1;
    emulation::order() = drawn;
  }
  for (const char* name : {"late-warp:0", "early-warp:1"}) {
    const InOrder order(name);
    EXPECT_EQ(read_without_a_barrier(), 2u) << name;
  }
  for (const char* name : {"late-warp:1", "early-warp:0", "late-warp:2", "early-warp:2"}) {
    const InOrder order(name);
    EXPECT_EQ(read_without_a_barrier(), 1u) << name;
  }
}

// Each block in turn waits for a flag, so a late block, or an early one that polls before the flag is set, lets the
// other blocks run.
TEST(Emulation, InEveryOrderThreadsThatWaitForOneAnotherEnd) {
  for (const char* name :
       {"late-warp", "early-warp", "late-block", "early-block", "late-warp:1", "early-warp:5", "late-block:2"}) {
    const InOrder order(name);
    for (const bool cooperative : {false, true}) {
      uint32_t turn = 0;
      run({.grid = 4, .block = 64, .cooperative = cooperative}, [&] {
        __syncthreads();
        if (cooperative && threadIdx.x == 33)
          while (__atomic_load_n(&turn, __ATOMIC_RELAXED) != blockIdx.x) emulation::yield();
        __syncthreads();
        if (threadIdx.x == 5) __atomic_fetch_add(&turn, 1, __ATOMIC_RELAXED);
      });
      EXPECT_EQ(turn, 4u) << name;
    }
  }
}

// Threads held back poll a flag that the early warp sets after a barrier. Their polls must not keep that warp waiting.
TEST(Emulation, AnEarlyWarpIsNotKeptWaitingByThreadsThatPoll) {
  const InOrder order("early-warp:0");
  uint32_t flag = 0, seen = 0;
  run({.grid = 1, .block = 96}, [&] {
    for (int i = 0; threadIdx.x / 32 == 1 && i < 100; ++i) __syncwarp();
    if (threadIdx.x < 64) emulation::sync_named(1, 64, true, emulation::Where::current());
    if (threadIdx.x == 0) flag = 1;
    while (threadIdx.x >= 32 && flag == 0) emulation::yield();
    ++seen;
  });
  EXPECT_EQ(seen, 96u);
}

TEST(Emulation, RefusesUnknownOrdersByName) {
  using emulation::Order;
  EXPECT_EQ(emulation::order_named("late-warp"), (Order{Order::Kind::late_warp, {}}));
  EXPECT_EQ(emulation::order_named("early-block:12"), (Order{Order::Kind::early_block, 12u}));
  for (const char* name : {"late", "late-warp:", "late-warp:x", "late-warp:1x", ":1", "late-warp:-1"})
    EXPECT_THROW((void)emulation::order_named(name), Error) << name;
}

TEST(Emulation, BlocksHaveFreshSharedMemoryAndMeetAtBarriers) {
  std::vector<float> out(4 * 64);
  run({.grid = 4, .block = 64, .smem = 256}, [&] {
    auto& tile = tile::shared<float[64]>();
    auto& other = tile::shared<float[64], 1>();
    float* const dynamic = *tile::dynamic_shared<float[64]>();
    EXPECT_NE(&tile, &other);
    EXPECT_TRUE(std::isnan(tile[threadIdx.x]) && std::isnan(dynamic[threadIdx.x])) << "poisoned";
    const uint32_t t = threadIdx.x;
    __syncthreads();
    tile[t] = float(blockIdx.x * 100 + t);
    __syncthreads();
    other[t] = tile[63 - t];
    __syncthreads();
    dynamic[t] = other[(t + 1) % 64];
    __syncthreads();
    out[blockIdx.x * 64 + t] = dynamic[t];
  });
  for (uint32_t i = 0; i < out.size(); ++i) EXPECT_EQ(out[i], float(i / 64 * 100 + 63 - (i % 64 + 1) % 64));
}

TEST(Emulation, LanesExchangeAsTheHardwareSays) {
  run({.grid = 1, .block = 80}, [] {
    const int lane = int(threadIdx.x % 32), lanes = threadIdx.x < 64 ? 32 : 16;
    EXPECT_EQ(__shfl_xor_sync(~0u, lane, 5), (lane ^ 5) < lanes ? lane ^ 5 : lane);
    EXPECT_EQ(__shfl_sync(~0u, lane * 1.5, 3), 4.5);
    EXPECT_EQ(__shfl_sync(~0u, lane, 2, 8), lane / 8 * 8 + 2);
    EXPECT_EQ(__shfl_down_sync(~0u, lane, 2, 8), lane % 8 < 6 ? lane + 2 : lane);
    EXPECT_EQ(__shfl_up_sync(~0u, lane, 3, 16), lane % 16 < 3 ? lane : lane - 3);
    const uint32_t all = lanes == 32 ? ~0u : 0xffffu;
    EXPECT_EQ(__ballot_sync(~0u, lane % 3 == 0), 0x49249249u & all);
    EXPECT_EQ(__any_sync(~0u, lane == 7), 1);
    EXPECT_EQ(__all_sync(~0u, lane != 7), 0);
    EXPECT_EQ(__reduce_add_sync(~0u, uint32_t(lane)), uint32_t(lanes * (lanes - 1) / 2));
    if (lane < 8) { EXPECT_EQ(__shfl_xor_sync(0xffu, lane, 7), 7 - lane) << "some lanes only"; }
    const bool elected = ptx::elect_one();
    EXPECT_EQ(elected, lane == 0);
    EXPECT_EQ(__syncthreads_count(lane == 1), 3);
    EXPECT_EQ(__syncthreads_and(lane < 32), 1);
    EXPECT_EQ(__syncthreads_or(lane == 40), 0);
  });
}

TEST(Emulation, NamedBarriersJoinSomeWarps) {
  std::vector<uint32_t> out(128);
  run({.grid = 1, .block = 128}, [&] {
    auto& word = tile::shared<uint32_t[128]>();
    const uint32_t t = threadIdx.x, warp = t / 32;
    word[t] = 1000 + t;
    if (warp < 2) {
      ptx::barrier_sync(1, 64);
      out[t] = word[(t + 32) % 64];
    } else if (warp == 2) {
      ptx::barrier_arrive(2, 64);
    } else {
      ptx::barrier_sync(2, 64);
      out[t] = word[t - 32];
    }
  });
  for (uint32_t t = 0; t < 64; ++t) EXPECT_EQ(out[t], 1000 + (t + 32) % 64);
  for (uint32_t t = 96; t < 128; ++t) EXPECT_EQ(out[t], 1000 + t - 32);
}

TEST(Emulation, ClustersReachEachOthersSharedMemory) {
  for (const uint32_t size : {3, 16}) {
    std::vector<uint32_t> out(2 * size * 4);
    run({.grid = 2 * size, .block = 32, .cluster = int(size)}, [&] {
      auto& mine = tile::shared<uint32_t[4]>();
      auto& theirs = tile::shared<uint32_t[4], 1>();
      const uint32_t rank = ptx::cluster_rank(), next = (rank + 1) % ptx::cluster_size();
      if (threadIdx.x < 4) mine[threadIdx.x] = blockIdx.x * 10 + threadIdx.x;
      ptx::cluster_arrive();
      ptx::cluster_wait();
      if (threadIdx.x == 0) {
        const uint32_t four[4] = {mine[0], mine[1], mine[2], mine[3]};
        ptx::cluster_store(ptx::cluster_address(theirs, next), four);
      }
      ptx::cluster_arrive();
      ptx::cluster_wait();
      if (threadIdx.x < 4) out[blockIdx.x * 4 + threadIdx.x] = theirs[threadIdx.x];
    });
    for (uint32_t i = 0; i < 2 * size * 4; ++i)
      EXPECT_EQ(out[i], (i / (4 * size) * size + (i / 4 % size + size - 1) % size) * 10 + i % 4);
  }
}

// Two groups of 16 copies each: all of a group are there after its wait, and some of the second are late.
TEST(Emulation, CopiesArriveAtTheirWaitAtTheLatest) {
  const std::vector<uint32_t> from(4 * 32, 7);
  run({.grid = 1, .block = 1}, [&] {
    auto& memory = tile::shared<std::array<uint32_t, 4 * 32>>();
    memory.fill(0);
    const auto request = [&](int first) {
      for (int i = first; i < first + 16; ++i) ptx::cp_async<16>(ptx::shared_address(&memory[4 * i]), &from[4 * i], 12);
      ptx::cp_async_commit_group();
    };
    const auto arrived = [&](int first) {
      return std::count(memory.begin() + 4 * first, memory.begin() + 4 * (first + 16), 7u);
    };
    request(0), request(16);
    EXPECT_LT(arrived(0), 48);
    ptx::cp_async_wait_group<1>();
    EXPECT_EQ(arrived(0), 48);
    EXPECT_LT(arrived(16), 48);
    ptx::cp_async_wait_group<0>();
    EXPECT_EQ(arrived(16), 48);
    EXPECT_EQ(std::count(memory.begin(), memory.end(), 0u), 32) << "bytes behind the valid ones";
  });
}

// d (16 x 8) = a (16 x 16) b (8 x 16)^T by cp.async, ldmatrix, mma and stmatrix, one warp: their fragments must agree.
template <class T> void check_warp_product() {
  testing::Buffer a(dtype_of<T>, {16, 16}), b(dtype_of<T>, {8, 16});
  testing::fill_normal(a, 1);
  testing::fill_normal(b, 2);
  std::vector<float> d(16 * 8);
  std::vector<uint16_t> rounded(16 * 8);
  run({.grid = 1, .block = 32}, [&] {
    auto& tile_a = tile::shared<T[16][16]>();
    auto& tile_b = tile::shared<T[8][16]>();
    const uint32_t lane = threadIdx.x;
    ptx::cp_async<16>(ptx::shared_address(&tile_a[lane / 2][lane % 2 * 8]), a.tensor().template ptr<T>() + lane * 8);
    if (lane < 16)
      ptx::cp_async<16>(ptx::shared_address(&tile_b[lane / 2][lane % 2 * 8]), b.tensor().template ptr<T>() + lane * 8);
    ptx::cp_async_commit_group();
    ptx::cp_async_wait_group<0>();
    __syncwarp();
    uint32_t fa[4], fb[2];
    ptx::ldmatrix(fa, ptx::shared_address(&tile_a[lane % 16][lane / 16 * 8]));
    ptx::ldmatrix(fb, ptx::shared_address(&tile_b[lane % 8][lane / 8 % 2 * 8]));
    float sum[4] = {};
    ptx::mma_m16n8k16(T{}, sum, fa, fb);
    for (int i = 0; i < 4; ++i) d[(lane / 4 + uint32_t(i) / 2 * 8) * 8 + lane % 4 * 2 + uint32_t(i) % 2] = sum[i];
    const uint32_t packed[2] = {ptx::pack(T{}, sum[0], sum[1]), ptx::pack(T{}, sum[2], sum[3])};
    auto& tile_d = tile::shared<T[16][8]>();
    ptx::stmatrix(ptx::shared_address(&tile_d[lane % 16][0]), packed);
    __syncwarp();
    for (uint32_t i = lane; i < 128; i += 32) rounded[i] = tile_d[i / 8][i % 8].bits;
  });
  const auto x = testing::values(a), y = testing::values(b);
  for (size_t m = 0; m < 16; ++m)
    for (size_t n = 0; n < 8; ++n) {
      double want = 0;
      for (size_t k = 0; k < 16; ++k) want += x[m * 16 + k] * y[n * 16 + k];
      ASSERT_NEAR(d[m * 8 + n], want, 1e-5);
      ASSERT_EQ(rounded[m * 8 + n], T(d[m * 8 + n]).bits);
    }
}
TEST(Emulation, MatricesAndProductsOfAWarp) {
  check_warp_product<bf16>();
  check_warp_product<f16>();
}

// --- planted bugs

TEST(EmulationFinds, ABarrierThatSomeThreadsMiss) {
  const std::string text = complaint({.grid = 2, .block = 64}, [] {
    if (threadIdx.x < 16) __syncthreads();
  });
  EXPECT_NE(text.find("16 wait for a block barrier at emulation.emulated.test.cpp:"), std::string::npos) << text;
  EXPECT_NE(text.find("48 have ended"), std::string::npos) << text;
}

TEST(EmulationFinds, ThreadsThatMeetAtDifferentBarriers) {
  const std::string text = complaint({.grid = 1, .block = 64}, [] {
    if (threadIdx.x < 16)
      __syncthreads();
    else
      __syncthreads();
  });
  EXPECT_NE(text.find("while others wait at emulation.emulated.test.cpp:"), std::string::npos) << text;
}

TEST(EmulationFinds, AShuffleThatSomeLanesMiss) {
  const std::string text = complaint({.grid = 1, .block = 32}, [] {
    if (threadIdx.x != 5) (void)__shfl_xor_sync(~0u, 1, 1);
  });
  EXPECT_NE(text.find("31 wait for lanes of its warp"), std::string::npos) << text;
}

TEST(EmulationFinds, MisalignedVectors) {
  alignas(16) static uint32_t memory[8] = {};
  const std::string text = complaint({.grid = 1, .block = 1}, [] {
    uint32_t w[4];
    ptx::load_streaming(memory + 1, w);
  });
  EXPECT_NE(text.find("16 bytes, expected it aligned"), std::string::npos) << text;
}

TEST(EmulationFinds, SharedAddressesBeyondTheirVariable) {
  const std::string text = complaint({.grid = 1, .block = 32}, [] {
    auto& tile = tile::shared<uint16_t[8][8]>();
    uint32_t r[2];
    ptx::ldmatrix(r, ptx::shared_address(tile) + threadIdx.x % 16 * 16);
  });
  EXPECT_NE(text.find("inside its 128"), std::string::npos) << text;
}

TEST(EmulationFinds, MoreSharedMemoryThanTheLaunchAskedFor) {
  const std::string text =
      complaint({.grid = 1, .block = 32, .smem = 100}, [] { (void)tile::dynamic_shared<char[128]>(); });
  EXPECT_NE(text.find("100 bytes of dynamic shared memory, expected 128"), std::string::npos) << text;
}

TEST(EmulationFinds, AClusterThatDoesNotWaitForABlockItWrites) {
  bool found = false;
  for (uint64_t seed = 1; seed < 20 && !found; ++seed) {
    emulation::settings().seed = seed;
    found = complaint({.grid = 2, .block = 32, .cluster = 2}, [] {
              auto& word = tile::shared<uint32_t[1]>();
              if (threadIdx.x == 0) word[0] = 1;
              ptx::cluster_arrive();
              ptx::cluster_wait();
              const uint32_t w[1] = {2};
              if (ptx::cluster_rank() == 0) ptx::cluster_store(ptx::cluster_address(word, 1), w);
            }).find("which has ended") != std::string::npos;
  }
  emulation::settings().seed = 1;
  EXPECT_TRUE(found);
}

// Reads the neighbour's word without a barrier: some orders give a wrong result, and ThreadSanitizer reports the race
// in any order.
void read_without_barrier(std::vector<uint32_t>* out) {
  run({.grid = 1, .block = 32}, [&] {
    auto& tile = tile::shared<uint32_t[32]>();
    tile[threadIdx.x] = threadIdx.x;
    (*out)[threadIdx.x] = tile[(threadIdx.x + 1) % 32];
  });
}
TEST(EmulationFinds, AMissingBarrier) {
#if defined(__SANITIZE_THREAD__)
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";  // ThreadSanitizer reports nothing after a fork
  std::vector<uint32_t> out(32);
  EXPECT_EXIT(
      {
        read_without_barrier(&out);
        std::exit(0);
      },
      ::testing::ExitedWithCode(66), "data race");
#else
  bool found = false;
  for (uint64_t seed = 1; seed < 8; ++seed) {
    emulation::settings().seed = seed;
    std::vector<uint32_t> out(32);
    read_without_barrier(&out);
    for (uint32_t t = 0; t < 32; ++t) found |= out[t] != (t + 1) % 32;
  }
  emulation::settings().seed = 1;
  EXPECT_TRUE(found);
#endif
}

#if defined(__SANITIZE_ADDRESS__)
TEST(EmulationFinds, PlainAccessesBeyondSharedMemory) {
  EXPECT_DEATH(run({.grid = 1, .block = 32},
                   [] {
                     uint32_t* const words = tile::shared<uint32_t[24]>();
                     words[threadIdx.x] = 1;
                   }),
               "AddressSanitizer");
}
// The sanitizer's knowledge of a thread's stack survives a switch to other threads: the first thread to arrive has to
// wait.
TEST(EmulationFinds, WritesBeyondALocalArrayBehindABarrier) {
  uint32_t came = 0;
  EXPECT_DEATH(run({.grid = 1, .block = 32},
                   [&] {
                     uint32_t words[4] = {};
                     uint32_t* volatile const at = words;
                     const bool first = came++ == 0;
                     __syncthreads();
                     if (first) at[4] = 1;
                   }),
               "stack-buffer-overflow");
}
#endif

}  // namespace
}  // namespace ingot
