#pragma once
// The weight stream of a persistent kernel's block: a warp copies the weights, chunk by chunk in the order of their
// use, into a ring of slots, and teams of warps take the slots in turn. The ring keeps running across grid barriers,
// because no block writes weights. The number of chunks in flight is bounded: requests that wait in the memory system
// delay the grid barriers, but chunks that wait in the ring do not.
#include <cstdint>
#include <type_traits>

#include "ingot/gpu/tile/flag.cuh"
#include "ingot/megakernel/weight_stream.h"
#ifdef INGOT_EMULATE
#include "ingot/gpu/emulation/ptx.h"
#else
#include "ingot/gpu/ptx/mbarrier.cuh"
#include "ingot/gpu/ptx/tma.cuh"
#endif

namespace ingot::megakernel {

// Only a bug can keep these barriers from completing, because every wait of the arriving threads is bounded.
__device__ __forceinline__ void wait_for_slot(uint64_t* barrier, uint32_t parity) {
#ifdef INGOT_EMULATE
  while (!ptx::mbarrier_try_wait(barrier, parity)) {}
#else
  tile::wait_or_trap(barrier, parity);
#endif
}

// What the copying warp tells the readers of a chunk.
struct alignas(16) WeightNote {
  uint32_t word[4];
};
struct WeightStreamMemory {
  uint64_t full[kMostSlots], empty[kMostSlots];
  WeightNote note[kMostSlots];

  // Called by a single thread, before a barrier of the block.
  __device__ __forceinline__ void begin() {
    for (uint32_t i = 0; i < kMostSlots; ++i) {
      ptx::mbarrier_init(&full[i], 1);
      ptx::mbarrier_init(&empty[i], kTeamWarps);
    }
    ptx::fence_mbarrier_init();
  }
};

// A fill of the ring: its slot, and the parity of the phase completed by the fill.
struct RingPlace {
  uint32_t slot = 0, phase = 0;
  __device__ __forceinline__ void advance(uint32_t slots) {
    if (++slot == slots) slot = 0, phase ^= 1;
  }
};
// The copying warp's view, with the copy engine.
class WeightWriter {
 public:
  __device__ __forceinline__ WeightWriter(const WeightRing& ring, WeightStreamMemory& m, char* slots)
      : ring_(ring), m_(m), slots_(slots) {}
  // Called by all lanes of a warp; lane `lane` holds the arguments. `bytes` is at most kSlotBytes and a multiple of 16.
  __device__ __forceinline__ void put(uint32_t lane, const uint8_t* from, uint32_t bytes, const WeightNote& note) {
    // No block reads these weights again before the next token, so they should not displace other data in L2.
    put(lane, bytes, note, ring_.ahead,
        [&](char* slot, uint64_t* full) { ptx::bulk_load(slot, from, bytes, full, policy_); });
  }
  // The same for a chunk that copy(slot, barrier) requests; `bytes` is the size of the chunk. The request is made when
  // fewer than `ahead` chunks are in flight.
  template <class Copy>
  __device__ __forceinline__ void put(uint32_t lane, uint32_t bytes, const WeightNote& note, uint32_t ahead,
                                      Copy&& copy) {
    wait_for_slot(&m_.empty[at_.slot], at_.phase ^ 1);
#pragma unroll 1
    for (; under_way_ >= ahead; --under_way_) {
      wait_for_slot(&m_.full[oldest_.slot], oldest_.phase);
      oldest_.advance(ring_.slots);
    }
    ++under_way_;
    __syncwarp();  // a chunk can arrive and be read before a slow lane has seen its empty slot
    if (threadIdx.x % 32 == lane) {
      m_.note[at_.slot] = note;
      ptx::mbarrier_arrive_expect_tx(&m_.full[at_.slot], bytes);
      copy(slots_ + at_.slot * kSlotBytes, &m_.full[at_.slot]);
    }
    at_.advance(ring_.slots);
  }
  // The same for a chunk of several pieces: copy(slot, source, load) calls load(to, from, bytes) for each piece of the
  // lane's `source`.
  template <class Source, class Copy>
  __device__ __forceinline__ void put_pieces(uint32_t lane, uint32_t bytes, const WeightNote& note, uint32_t ahead,
                                             const Source& source, Copy&& copy) {
    put(lane, bytes, note, ahead, [&](char* slot, uint64_t* full) {
      copy(slot, source, [&](char* to, const void* from, uint32_t n) { ptx::bulk_load(to, from, n, full); });
    });
  }
  // The L2 cache policy for loads of weights, to be used in copy() of the function above.
  __device__ __forceinline__ uint64_t policy() const { return policy_; }

 private:
  const WeightRing ring_;
  const uint64_t policy_ = ptx::evict_first_policy();
  WeightStreamMemory& m_;
  char* const slots_;
  RingPlace at_, oldest_;
  uint32_t under_way_ = 0;
};

// A reading warp's view: team `team` of `teams` takes every teams-th chunk, regardless of the matrix.
class WeightReader {
 public:
  __device__ __forceinline__ WeightReader(const WeightRing& ring, WeightStreamMemory& m, const char* slots,
                                          uint32_t team, uint32_t teams)
      : ring_(ring), m_(m), slots_(slots), teams_(teams), turn_(team) {
    at_.slot = team;
  }
  // Calls use(weights, note) for those of the next `count` chunks that belong to this team.
  template <class Use> __device__ __forceinline__ void read(uint32_t count, Use&& use) {
#pragma unroll 1
    while (turn_ < count) take(use);
    turn_ -= count;
  }
  // The index of this team's next chunk, counted from the present position.
  __device__ __forceinline__ uint32_t turn() const { return turn_; }
  // Takes this team's first chunk among the next `count`, if there is one. read() or finish() with the same count must
  // follow.
  template <class Use> __device__ __forceinline__ void read_one(uint32_t count, Use&& use) {
    if (turn_ < count) take(use);
  }
  // Call after read_one() has taken all of this team's chunks among the next `count`.
  __device__ __forceinline__ void finish(uint32_t count) { turn_ -= count; }

 private:
  template <class Use> __device__ __forceinline__ void take(Use&& use) {
    wait_for_slot(&m_.full[at_.slot], at_.phase);
    use(slots_ + at_.slot * kSlotBytes, m_.note[at_.slot]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(&m_.empty[at_.slot]);
    at_.slot += teams_;
    if (at_.slot >= ring_.slots) at_.slot -= ring_.slots, at_.phase ^= 1;
    turn_ += teams_;
  }

  const WeightRing& ring_;
  WeightStreamMemory& m_;
  const char* const slots_;
  const uint32_t teams_;
  RingPlace at_;
  uint32_t turn_;  // chunks of other teams before this team's next chunk
};

}  // namespace ingot::megakernel
