#pragma once
// Runs CUDA kernels on the CPU, for tests: every GPU thread is a fiber of the calling thread, all threads of a block
// (of a cluster; of the grid, in cooperative launches) are under way at once, and they change over only where they meet
// or touch an atomic, in an order drawn from a seed. So a run repeats exactly, and sanitizers see the kernel's own
// lines:
//     AddressSanitizer     accesses beyond a buffer, beyond shared memory (each block's is fresh, filled with NaNs)
//     ThreadSanitizer      two threads on one address without a barrier between them; fibers count as threads
//     the scheduler        threads that wait for each other for ever, or meet at different barriers
// mbarriers and linear bulk loads work, the loads at once. It shows nothing about wgmma, tensor copies, copies that
// land late or out of order, proxies, the real memory model, fast arithmetic or speed.
#include <cstddef>
#include <cstdint>
#include <functional>
#include <source_location>
#include <vector>

namespace ingot::emulation {

using Where = std::source_location;

struct Dim3 {
  uint32_t x = 0, y = 0, z = 0;
};
// What a thread knows of itself.
struct Place {
  Dim3 thread, block, block_dim, grid_dim;
};
const Place& place();

struct Settings {
  uint64_t seed = 1;            // of the order in which threads run
  int64_t resident_blocks = 0;  // of a cooperative launch: more are refused; 0: no limit
};
Settings& settings();

// GPUs that a build with the emulator for its GPU has, 1 at first. Launches of one do not wait for another's: who wants
// them under way at once makes them on threads of their own. `peers`: they say that they reach each other's memory.
void pretend_devices(int count, bool peers = true);

struct Shape {
  int64_t grid = 1, block = 1, smem = 0;
  int cluster = 1;
  bool cooperative = false;
};
// Runs `thread` for every thread of the grid, to its end. Throws what a thread threw, and Error(invalid_argument) for
// launches no GPU would take and for threads that wait for ever.
void run(const char* name, const Shape& shape, const std::function<void()>& thread);

// What a stream is given: done at once or, within record(), kept in `recorded` to be done again and again.
void submit(std::function<void()> work);
void record(const std::function<void()>& work, std::vector<std::function<void()>>& recorded);

// --- called by threads

void yield();                             // others may run
void maybe_yield();                       // now and then
void yield_to_others();                   // so may kernels on other threads of the process, which stand for other GPUs
uint64_t clock_ns(uint64_t passing = 0);  // virtual time: grows with every switch and by what is slept

// A barrier of all threads of the block; the number of them for which `vote` was true.
uint32_t sync_block(bool vote, Where where);
// Named barriers, by a count of threads.
void sync_named(uint32_t id, uint32_t threads, bool wait, Where where);

// The lanes of `mask` give a value each, and each gets all of them.
struct Lanes {
  uint64_t value[32] = {};
  uint32_t mask = 0;  // that exist
};
Lanes exchange(uint32_t mask, uint64_t value, Where where);
void sync_warp(uint32_t mask, Where where);
uint32_t lane();

uint32_t cluster_rank();
uint32_t cluster_size();
void cluster_arrive();
void cluster_wait(Where where);

// The block's memory for one variable (key: any address that stands for it). key nullptr: the dynamic shared memory.
void* shared_memory(const void* key, size_t bytes);
// Addresses of 32 bits, as instructions take them. They fail by name beyond the variable they belong to.
uint32_t shared_address(const void* p);
uint32_t cluster_address(uint32_t address, uint32_t rank);
void* at_shared_address(uint32_t address, uint32_t bytes);

[[noreturn]] void misaligned(const void* p, size_t bytes);

}  // namespace ingot::emulation
