#include <memory>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/megakernel/grid_barrier.cuh"
#include "ingot/megakernel/grid_barrier_times.h"
#include "ingot/megakernel/traffic.cuh"

namespace ingot::megakernel {
namespace {

constexpr uint32_t kTeam = 128, kThreads = 512, kWarmUp = 50, kRounds = 1000;
constexpr uint32_t kHeld = 12;  // pairs of words loaded at the same time
struct Team {
  __device__ __forceinline__ static void sync() { ptx::barrier_sync_unaligned(1, kTeam); }
};
enum class Way { barrier, fenced, stamped, polled };
struct Timed {
  Grid grid;
  Way way;
  uint32_t numbers;  // even
  float* plain;      // (2, numbers)
  uint64_t* words;   // (2, numbers): a number and its round
  float* sink;
  uint64_t* ns;            // times of kRounds rounds
  const uint8_t* traffic;  // memory for concurrent reads of further warps, or null
  int64_t traffic_bytes;
};
struct TimedMemory {
  GridBarrierMemory grid_barriers;
  uint32_t done;
};

__device__ void hand_over(const Timed& p, TimedMemory& m) {
  const GridBarriers<Team> grid_barriers(p.grid, m.grid_barriers);
  grid_barriers.begin();
  const uint32_t each = (p.numbers + gridDim.x - 1) / gridDim.x, first = min(blockIdx.x * each, p.numbers),
                 end = min(first + each, p.numbers);
  uint64_t start = 0;
  float read = 0;
#pragma unroll 1
  for (uint32_t i = 1; i <= kWarmUp + kRounds; ++i) {
    if (i == kWarmUp + 1) start = ptx::global_timer();
    // Blocks are at most one round apart, so two places used in turn are enough.
    float* const plain = p.plain + i % 2 * p.numbers;
    uint64_t* const words = p.words + i % 2 * p.numbers;
    if (p.way != Way::barrier)
      for (uint32_t n = first + threadIdx.x; n < end; n += kTeam) {
        const float mine = read * 1e-9f + float(n);
        if (p.way == Way::fenced)
          plain[n] = mine;
        else
          ptx::store_relaxed(words + n, uint64_t(i) << 32 | __float_as_uint(mine));
      }
    if (p.way != Way::polled) {
      grid_barriers.arrive(p.way == Way::fenced);
      grid_barriers.wait();
    }
    if (p.way == Way::fenced)
      for (uint32_t n = 4 * threadIdx.x; n + 3 < p.numbers; n += 4 * kTeam) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(plain + n));
        read += v.x + v.y + v.z + v.w;
      }
    else if (p.way != Way::barrier)
#pragma unroll 1
      for (uint32_t from = 2 * threadIdx.x; from < p.numbers; from += kHeld * 2 * kTeam) {
        uint64_t w[kHeld][2];
        const auto complete = [&] {
          bool all = true;
#pragma unroll
          for (uint32_t u = 0; u < kHeld; ++u)
            if (from + u * 2 * kTeam < p.numbers) ptx::load_relaxed(words + from + u * 2 * kTeam, w[u]);
#pragma unroll
          for (uint32_t u = 0; u < kHeld; ++u)
            all &= from + u * 2 * kTeam >= p.numbers || (uint32_t(w[u][0] >> 32) == i && uint32_t(w[u][1] >> 32) == i);
          return all;
        };
        tile::wait_until(
            complete, [] { return 0u; }, 1, p.grid.watch, i);
#pragma unroll
        for (uint32_t u = 0; u < kHeld; ++u)
          if (from + u * 2 * kTeam < p.numbers)
            read += __uint_as_float(uint32_t(w[u][0])) + __uint_as_float(uint32_t(w[u][1]));
      }
    // No word is overwritten before all threads have read the word: before publishing round i + 2 a block has seen all
    // words of round i + 1, and every thread publishes its words of round i + 1 after reading round i.
    Team::sync();
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.ns = ptx::global_timer() - start;
  p.sink[blockIdx.x * kTeam + threadIdx.x] = read;
}

__global__ void __launch_bounds__(kThreads, 1) grid_barrier_times_kernel(const __grid_constant__ Timed p) {
  auto& m = tile::shared<TimedMemory>();
  if (threadIdx.x == 0) m.done = 0;
  __syncthreads();
  if (threadIdx.x < kTeam) {
    hand_over(p, m);
    if (threadIdx.x == 0) *static_cast<volatile uint32_t*>(&m.done) = 1;
    return;
  }
  if (p.traffic == nullptr) return;
  read_until<kTeam, kThreads>(m.done, p.traffic, p.traffic_bytes, p.sink);
}

}  // namespace

GridBarrierTimes measure_grid_barriers(uint32_t numbers, bool loaded) {
  INGOT_CHECK(numbers > 0 && numbers % 4 == 0, "grid barrier times: found ", numbers,
              " numbers, expected a multiple of 4");
  const int64_t blocks = gpu::device_info().sms;
  const gpu::DeviceMemory counter(256), plain(8 * int64_t(numbers)), words(16 * int64_t(numbers)),
      sink(4 * kTeam * blocks), ns(8);
  const gpu::OwnedStream stream;
  gpu::WaitControl waits;
  std::unique_ptr<gpu::DeviceMemory> traffic;
  if (loaded) {
    traffic = std::make_unique<gpu::DeviceMemory>(kTraffic);
    gpu::fill_bytes(traffic->data(), 1, kTraffic, stream);
  }
  const auto measure = [&](Way way) {
    gpu::fill_bytes(counter.data(), 0, counter.bytes(), stream);
    gpu::fill_bytes(words.data(), 0, words.bytes(), stream);
    const Timed p{.grid = {.counter = static_cast<uint32_t*>(counter.data()), .watch = waits.watch()},
                  .way = way,
                  .numbers = numbers,
                  .plain = static_cast<float*>(plain.data()),
                  .words = static_cast<uint64_t*>(words.data()),
                  .sink = static_cast<float*>(sink.data()),
                  .ns = static_cast<uint64_t*>(ns.data()),
                  .traffic = traffic ? static_cast<const uint8_t*>(traffic->data()) : nullptr,
                  .traffic_bytes = traffic ? traffic->bytes() : 0};
    gpu::launch("grid barrier times", grid_barrier_times_kernel,
                {.grid = blocks, .block = kThreads, .cooperative = true}, stream, p);
    stream.synchronize();
    waits.check("grid barrier times");
    uint64_t found = 0;
    gpu::copy_to_host(&found, ns.data(), sizeof found);
    return double(found) * 1e-3 / kRounds;
  };
  return {.barrier = measure(Way::barrier),
          .fenced = measure(Way::fenced),
          .stamped = measure(Way::stamped),
          .polled = measure(Way::polled)};
}

}  // namespace ingot::megakernel
