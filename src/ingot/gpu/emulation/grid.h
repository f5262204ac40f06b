#pragma once
// Runs CUDA kernels on the CPU, for tests. Every GPU thread is a fiber of the calling thread, and all threads of a
// block (of a cluster; in cooperative launches, of the grid) exist at the same time. A fiber switches to the next only
// at a barrier or an atomic operation, in an order drawn from a seed, so a run repeats exactly. Sanitizers see the
// kernel's own source lines:
//     AddressSanitizer   finds accesses beyond a buffer, or beyond shared memory (each block has its own, filled with
//                        NaNs)
//     ThreadSanitizer    finds accesses of two threads to the same address without a barrier between them; fibers
//                        count as threads
//     the scheduler      finds threads in a deadlock, or at different barriers
//     late copies        a copy of cp.async arrives at once or at its thread's wait for its group, as drawn from the
//                        seed: results are wrong where a wait is missing, or a stage is overwritten too early
// mbarriers and linear bulk loads work; the loads complete at once. The emulator does not test wgmma, tensor copies,
// late arrivals of bulk loads, proxies, the real memory model, fast arithmetic or speed.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <vector>

#include "ingot/gpu/limits.h"

namespace ingot::emulation {

using Where = std::source_location;

struct Dim3 {
  uint32_t x = 0, y = 0, z = 0;
};
// A thread's own indices.
struct Place {
  Dim3 thread, block, block_dim, grid_dim;
};
const Place& place();

struct Settings {
  uint64_t seed = 1;            // seed of the order of the threads
  int64_t resident_blocks = 0;  // the most blocks of a cooperative launch, 0: no limit
};
Settings& settings();

// The number of GPUs in a build whose GPU is the emulator, 1 at first. Launches on different GPUs do not wait for each
// other: a test of concurrent launches makes each launch on its own thread. `peers` says whether the GPUs report access
// to each other's memory.
void set_device_count(int count, bool peers = true);
// From now on the emulated GPUs have at most the limits `wanted`. Before the first call they have the limits of Hopper,
// but only 4 multiprocessors and 1 MB of L2, and at most the limits of the GPU that INGOT_GPU_AS names.
void set_device_limits(const gpu::Limits& wanted);

struct Shape {
  int64_t grid = 1, block = 1, smem = 0;
  int cluster = 1;
  bool cooperative = false;
};
// Runs `thread` for every thread of the grid, to its end. Rethrows an exception of a thread. Throws
// Error(invalid_argument) for launches that a GPU would refuse and for deadlocks.
void run(const char* name, const Shape& shape, const std::function<void()>& thread);

// Work for a stream: done at once or, within record(), kept in `recorded` to be repeated.
void submit(std::function<void()> work);
void record(const std::function<void()>& work, std::vector<std::function<void()>>& recorded);

// --- called by threads

void yield();        // lets other fibers run
void maybe_yield();  // the same, sometimes
// Lets the other threads of this emulated GPU run, and the emulated GPUs on other threads of the process.
void yield_to_others();
uint64_t clock_ns(uint64_t passing = 0);  // virtual time: grows with every switch and every sleep

// A barrier of all threads of the block; returns the number of threads with a true `vote`.
uint32_t sync_block(bool vote, Where where);
// Named barriers, by a count of threads.
void sync_named(uint32_t id, uint32_t threads, bool wait, Where where);

// Each lane of `mask` contributes a value and receives all values.
struct Lanes {
  uint64_t value[32] = {};
  uint32_t mask = 0;  // threads of the warp
};
Lanes exchange(uint32_t mask, uint64_t value, Where where);
void sync_warp(uint32_t mask, Where where);
uint32_t lane();

uint32_t cluster_rank();
uint32_t cluster_size();
void cluster_arrive();
void cluster_wait(Where where);

// The block's memory for a variable. The key is any address that identifies the variable; a null key means the dynamic
// shared memory.
void* shared_memory(const void* key, size_t bytes);
// Addresses of 32 bits, the operands of instructions. An access beyond the variable of an address fails by name.
uint32_t shared_address(const void* p);
uint32_t cluster_address(uint32_t address, uint32_t rank);
void* at_shared_address(uint32_t address, uint32_t bytes);

// cp.async: copies `valid` bytes and clears the rest of `bytes`, now or in wait_for_copies(). Groups are a thread's
// own.
void copy_async(void* to, const void* from, uint32_t valid, uint32_t bytes);
void commit_copies();
void wait_for_copies(uint32_t groups_left);

[[noreturn]] void misaligned(const void* p, size_t bytes);

}  // namespace ingot::emulation
