#pragma once
// Waits of device code. Every wait is bounded (watch.h describes the end of an overlong wait).
//     wait_or_trap(barrier, parity)             an mbarrier with arrivals of this block, its cluster or the copy engine
//     poll_or_trap(done)                        a condition that other running blocks bring about
//     wait(barrier, parity, watch, what)        as wait_or_trap(), in a kernel that has a Watch
//     wait_at_least(flag, want, watch, what)    a counter that another block raises (flag_raise, or any release)
//     grid_barrier(counter, watch, what)        all blocks; only in kernels launched with `cooperative`
// The last three return false when a wait gave up. A kernel may ignore this result and run on, as long as no address
// and no loop bound depends on the awaited data; before its end such a kernel calls leave(), because copies may still
// be in flight.
// Two further waits count polls and trap, because reading a clock would cost too much: the sums of a cluster
// (reduce.cuh), and words certain to arrive after a grid barrier (megakernel/sums.cuh).
#include <cstdint>

#include "ingot/gpu/ptx/atomics.cuh"
#include "ingot/gpu/ptx/cluster.cuh"
#include "ingot/gpu/ptx/thread.cuh"
#include "ingot/gpu/watch.h"
#ifndef INGOT_EMULATE
#include "ingot/gpu/ptx/mbarrier.cuh"
#endif

namespace ingot::tile {

constexpr uint32_t kTrapAfter = 10'000'000;  // of 1024 ns: far longer than any copy and any time slice under a debugger

// The clock in 32 bits: one register across the loop, in kernels whose accumulators leave few registers.
__device__ inline uint32_t coarse_timer() { return uint32_t(ptx::global_timer() >> 10); }

// For conditions that stay false only because of a bug. The first function reads the clock before it calls done(), the
// second function only after done() has returned false.
template <class Done> __device__ __forceinline__ void poll_or_trap(Done&& done) {
  const uint32_t start = coarse_timer();
  while (!done())
    if (coarse_timer() - start > kTrapAfter) ptx::trap();
}
template <class Done> __device__ __forceinline__ void ask_then_poll_or_trap(Done&& done) {
  for (uint32_t start = 0; !done();) {
    const uint32_t now = coarse_timer() | 1;
    if (start == 0) start = now;
    if (now - start > kTrapAfter) ptx::trap();
  }
}

#ifndef INGOT_EMULATE
// For pipelines inside a block or cluster. Written out, because kernels with many waits get a different number of
// registers when this function calls poll_or_trap().
__device__ inline void wait_or_trap(uint64_t* barrier, uint32_t parity) {
  if (ptx::mbarrier_try_wait(barrier, parity)) return;
  const uint32_t start = coarse_timer();
  while (!ptx::mbarrier_try_wait(barrier, parity))
    if (coarse_timer() - start > kTrapAfter) ptx::trap();
}
// The same by a whole warp, whose lanes then go on together, so the compiler keeps the following values in uniform
// registers.
__device__ inline void wait_warp_or_trap(uint64_t* barrier, uint32_t parity) {
  if (__all_sync(~0u, ptx::mbarrier_try_wait(barrier, parity))) return;
  const uint32_t start = coarse_timer();
  while (!__all_sync(~0u, ptx::mbarrier_try_wait(barrier, parity)))
    if (coarse_timer() - start > kTrapAfter) ptx::trap();
}
#endif

__device__ inline bool stopped(const gpu::Watch& watch) { return ptx::load_relaxed(watch.stop) != gpu::kRunning; }

// Ends all waits of the grid; the first thread to do so leaves a record for the host.
__device__ inline void give_up(const gpu::Watch& watch, uint32_t why, uint32_t what, uint32_t expected, uint32_t seen,
                               uint64_t waited_ns) {
  if (ptx::compare_exchange_acq_rel(watch.stop, gpu::kRunning, why) != gpu::kRunning) return;
  gpu::WaitRecord& r = *watch.record;
  r.what = what;
  r.block = blockIdx.x;
  r.thread = threadIdx.x;
  r.expected = expected;
  r.seen = seen;
  r.waited_ns = waited_ns;
  ptx::store_release_system(&r.state, why);
}

// Polls until done() is true; done() may change `what`. seen() is called only for the record.
template <class Done, class Seen>
__device__ __forceinline__ bool wait_until(Done&& done, Seen&& seen, uint32_t expected, const gpu::Watch& watch,
                                           const uint32_t& what) {
  uint64_t start = 0;
  for (uint32_t polls = 1; !done(); ++polls) {
    if (polls % 32 != 0) continue;  // the first polls are not delayed by looking at stop words and clock
    if (stopped(watch)) return false;
    const uint64_t now = ptx::global_timer();
    if (start == 0) start = now;
    const bool by_host =
        polls % 1024 == 0 && ptx::load_acquire_system(watch.host_stop) != 0;  // over PCIe, therefore rarely
    if (by_host || now - start > watch.limit_ns) {
      give_up(watch, by_host ? gpu::kStoppedByHost : gpu::kTimedOut, what, expected, seen(), now - start);
      return false;
    }
    ptx::sleep(32);
  }
  return true;
}

#ifndef INGOT_EMULATE
__device__ inline bool wait(uint64_t* barrier, uint32_t parity, const gpu::Watch& watch, uint32_t what) {
  return wait_until([&] { return ptx::mbarrier_try_wait(barrier, parity); }, [&] { return parity ^ 1; }, parity, watch,
                    what);
}
#endif

// Counters only grow; the comparison also holds when a counter wraps around.
__device__ inline bool reached(uint32_t value, uint32_t want) { return int32_t(value - want) >= 0; }
// A single thread waits; a block barrier then makes the data visible to all threads.
__device__ inline bool wait_at_least(const uint32_t* flag, uint32_t want, const gpu::Watch& watch, uint32_t what) {
  return wait_until([&] { return reached(ptx::load_acquire(flag), want); }, [&] { return ptx::load_relaxed(flag); },
                    want, watch, what);
}
// A single thread raises the flag after a block barrier, and releases the writes of the whole block.
__device__ inline void flag_raise(uint32_t* flag, uint32_t by = 1) { ptx::add_release(flag, by); }

// Called by all threads of all blocks. The counter is zero before its first use and then serves any number of barriers,
// launches and grid sizes: block 0 adds a number that makes the top bit flip when all blocks have arrived. After a wait
// gave up the counter must be set to zero.
__device__ inline bool grid_barrier(uint32_t* counter, const gpu::Watch& watch, uint32_t what) {
  constexpr uint32_t kTop = 0x80000000u;
  __syncthreads();
  bool ok = true;
  if (threadIdx.x == 0) {
    const uint32_t before = ptx::fetch_add_release(counter, blockIdx.x == 0 ? kTop - (gridDim.x - 1) : 1);
    ok = wait_until([&] { return ((ptx::load_acquire(counter) ^ before) & kTop) != 0; },
                    [&] { return ptx::load_relaxed(counter) & ~kTop; }, kTop, watch, what);
  }
  return __syncthreads_and(ok) != 0;
}

// Called before the end of a kernel that ignores failed waits, because bulk copies without a completed wait may still
// be writing to this block's shared memory. A millisecond is far longer than such a copy. Without a failed wait the
// function returns at once.
__device__ inline void leave(const gpu::Watch& watch) {
  if (!stopped(watch)) return;
  const uint64_t start = ptx::global_timer();
  while (ptx::global_timer() - start < 1'000'000) ptx::sleep(1000);
}

}  // namespace ingot::tile
