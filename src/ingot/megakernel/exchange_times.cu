#include <algorithm>
#include <memory>
#include <vector>

#include "ingot/gpu/launch.h"
#include "ingot/gpu/ptx/barrier.cuh"
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/gpu/tile/shared.cuh"
#include "ingot/megakernel/exchange.cuh"
#include "ingot/megakernel/exchange_times.h"
#include "ingot/megakernel/grid_barrier.cuh"
#include "ingot/megakernel/peers.h"
#include "ingot/megakernel/traffic.cuh"

namespace ingot::megakernel {
namespace {

constexpr uint32_t kTeam = 128, kThreads = 512, kWarmUp = 50, kRounds = 1000;
struct Team {
  __device__ __forceinline__ static void sync() { ptx::barrier_sync_unaligned(1, kTeam); }
};
enum class Way { one_way, both_ways, local, exchange };
struct Timed {
  Exchange exchange;
  Grid grid;
  Way way;
  uint32_t numbers;
  float *sums, *sink;
  uint64_t* ns;            // times of kRounds rounds; with both_ways, one time for the words of each GPU
  const uint8_t* traffic;  // memory for concurrent reads of further warps, or null
  int64_t traffic_bytes;
};
struct TimedMemory {
  GridBarrierMemory grid_barriers;
  uint32_t done;
};

// Ranks 0 and 1 send in turn, and `first` begins. Half a round is the time of a single direction.
__device__ void ping(const Timed& p, uint32_t first) {
  const uint32_t other = 1 - p.exchange.rank, word = 16 * first;
  uint64_t* const to = p.exchange.inbox[other] + word;
  const uint64_t* const here = p.exchange.inbox[p.exchange.rank] + word;
  uint64_t start = 0;
  for (uint32_t i = 1; i <= kWarmUp + kRounds; ++i) {
    if (i == kWarmUp + 1) start = ptx::global_timer();
    const auto wait = [&] {
      tile::wait_until([&] { return ptx::load_relaxed_system(here) == i; }, [&] { return i - 1; }, i, p.grid.watch,
                       wait_for_rank(0, other));
    };
    if (p.exchange.rank != first) wait();
    ptx::store_relaxed_system(to, uint64_t(i));
    if (p.exchange.rank == first) wait();
  }
  p.ns[first] = ptx::global_timer() - start;
}

__device__ void hand_over(const Timed& p, TimedMemory& m) {
  const GridBarriers<Team> grid_barriers(p.grid, m.grid_barriers);
  grid_barriers.begin();
  const uint32_t each = (p.numbers + gridDim.x - 1) / gridDim.x, first = blockIdx.x * each,
                 end = min(first + each, p.numbers);
  uint64_t start = 0;
  float read = 0;
  for (uint32_t i = 1; i <= kWarmUp + kRounds; ++i) {
    if (i == kWarmUp + 1) start = ptx::global_timer();
    float* const sums = p.sums + i % 2 * p.numbers;
    for (uint32_t n = first + threadIdx.x; n < end; n += kTeam) {
      const float mine = read * 1e-9f + float(n);
      if (p.way == Way::exchange) send(p.exchange, i, n, mine);
      sums[n] = p.way == Way::exchange
                    ? sum_of_ranks<1>(p.exchange, (1u << p.exchange.ranks) - 1, i, n, 0, p.grid.watch, 0)
                    : mine;
    }
    grid_barriers.arrive();
    grid_barriers.wait();
    for (uint32_t n = 4 * threadIdx.x; n + 3 < p.numbers; n += 4 * kTeam) {
      const float4 v = __ldcg(reinterpret_cast<const float4*>(sums + n));
      read += v.x + v.y + v.z + v.w;
    }
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.ns = ptx::global_timer() - start;
  p.sink[blockIdx.x * kTeam + threadIdx.x] = read;
}

__global__ void __launch_bounds__(kThreads, 1) exchange_times_kernel(const __grid_constant__ Timed p) {
  auto& m = tile::shared<TimedMemory>();
  if (threadIdx.x == 0) m.done = 0;
  __syncthreads();
  if (threadIdx.x < kTeam) {
    const uint32_t pings = p.way == Way::one_way ? 1 : p.way == Way::both_ways ? 2 : 0;
    if (pings == 0)
      hand_over(p, m);
    else if (blockIdx.x < pings && threadIdx.x == 0)
      ping(p, blockIdx.x);
    // The remaining blocks read until the measured blocks have finished.
    if (pings > 0 && threadIdx.x == 0) {
      if (blockIdx.x < pings) ptx::add_relaxed(p.grid.counter, 1u);
      tile::wait_until([&] { return ptx::load_relaxed(p.grid.counter) == pings; }, [&] { return 0u; }, pings,
                       p.grid.watch, 1);
    }
    if (threadIdx.x == 0) {
      pass_on_stop(p.exchange, p.grid.watch);
      *static_cast<volatile uint32_t*>(&m.done) = 1;
    }
    return;
  }
  if (p.traffic == nullptr) return;
  read_until<kTeam, kThreads>(m.done, p.traffic, p.traffic_bytes, p.sink);
}

struct RankMemory {
  std::unique_ptr<gpu::DeviceMemory> inbox, counter, sums, sink, ns, traffic;
  std::unique_ptr<gpu::WaitControl> waits;
  std::unique_ptr<gpu::OwnedStream> stream;
  int64_t blocks = 0;
  const uint8_t* to_read = nullptr;
};

double measure(std::vector<RankMemory>& ranks, Way way, uint32_t numbers) {
  const bool pings = way == Way::one_way || way == Way::both_ways;
  const uint32_t n = pings ? 2 : uint32_t(ranks.size());
  for (uint32_t r = 0; r < n; ++r) {
    const gpu::DeviceGuard guard{int(r)};
    gpu::fill_bytes(ranks[r].inbox->data(), 0, ranks[r].inbox->bytes(), *ranks[r].stream);
    gpu::fill_bytes(ranks[r].counter->data(), 0, ranks[r].counter->bytes(), *ranks[r].stream);
    ranks[r].stream->synchronize();
  }
  for (uint32_t r = 0; r < n; ++r) {
    const gpu::DeviceGuard guard{int(r)};
    RankMemory& m = ranks[r];
    Timed p{.grid = {.counter = static_cast<uint32_t*>(m.counter->data()), .watch = m.waits->watch()},
            .way = way,
            .numbers = numbers,
            .sums = static_cast<float*>(m.sums->data()),
            .sink = static_cast<float*>(m.sink->data()),
            .ns = static_cast<uint64_t*>(m.ns->data()),
            .traffic = m.to_read,
            .traffic_bytes = kTraffic};
    p.exchange.rank = r, p.exchange.ranks = n, p.exchange.words = numbers;
    for (uint32_t q = 0; q < n; ++q) {
      p.exchange.inbox[q] = static_cast<uint64_t*>(ranks[q].inbox->data());
      p.exchange.stop[q] = ranks[q].waits->watch().stop;
    }
    gpu::launch("exchange times", exchange_times_kernel,
                {.grid = m.blocks, .block = kThreads, .device = int(r), .cooperative = true}, *m.stream, p);
  }
  uint64_t longest = 0;
  for (uint32_t r = 0; r < n; ++r) {
    const gpu::DeviceGuard guard{int(r)};
    ranks[r].stream->synchronize();
    ranks[r].waits->check("exchange times");
    uint64_t ns[2] = {};
    gpu::copy_to_host(ns, ranks[r].ns->data(), sizeof ns);
    longest = std::max({longest, ns[0], way == Way::both_ways ? ns[1] : 0});
  }
  return double(longest) * 1e-3 / kRounds;
}

}  // namespace

ExchangeTimes measure_exchange(int count, uint32_t numbers, ExchangeLoad load) {
  std::vector<RankMemory> ranks(static_cast<size_t>(count));
  let_peers_reach(count);
  for (int r = 0; r < count; ++r) {
    const gpu::DeviceGuard guard(r);
    RankMemory& m = ranks[size_t(r)];
    const auto memory = [](int64_t bytes) { return std::make_unique<gpu::DeviceMemory>(bytes); };
    m.blocks = gpu::sm_count(r);
    m.inbox = memory(8 * Exchange::inbox_words(uint32_t(count), numbers));
    m.counter = memory(256), m.sums = memory(8 * int64_t(numbers)), m.sink = memory(4 * kTeam * m.blocks),
    m.ns = memory(16);
    if (load != ExchangeLoad::none) m.traffic = memory(kTraffic);
    m.waits = std::make_unique<gpu::WaitControl>();
    m.stream = std::make_unique<gpu::OwnedStream>();
    if (m.traffic) gpu::fill_bytes(m.traffic->data(), 1, kTraffic, *m.stream);
  }
  for (size_t r = 0; r < ranks.size(); ++r)
    if (const RankMemory& from = ranks[load == ExchangeLoad::link ? (r + 1) % ranks.size() : r]; from.traffic)
      ranks[r].to_read = static_cast<const uint8_t*>(from.traffic->data());
  return {.one_way = measure(ranks, Way::one_way, numbers) / 2,
          .both_ways = measure(ranks, Way::both_ways, numbers) / 2,
          .local = measure(ranks, Way::local, numbers),
          .exchange = measure(ranks, Way::exchange, numbers)};
}

}  // namespace ingot::megakernel
