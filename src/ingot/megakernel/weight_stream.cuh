#pragma once
// The weight stream of a persistent kernel's block: a warp copies the weights, chunk by chunk in the order of their
// use, into a ring of slots, and teams of warps take the slots in turn. The ring keeps running across grid barriers,
// because no block writes weights. The number of chunks in flight is bounded: requests that wait in the memory system
// delay the grid barriers, but chunks that wait in the ring do not.
#include <cstdint>
#include <type_traits>

#include "ingot/megakernel/weight_copies.cuh"
#include "ingot/megakernel/weight_stream.h"

namespace ingot::megakernel {

// The copying warp's note to the readers of a chunk.
struct alignas(16) WeightNote {
  uint32_t word[4];
};
struct WeightStreamMemory {
  uint64_t full[kMostSlots], empty[kMostSlots];
  WeightNote note[kMostSlots];

  // Called by a single thread, before a barrier of the block.
  template <class Copies = EngineCopies> __device__ __forceinline__ void begin() {
    for (uint32_t i = 0; i < kMostSlots; ++i) {
      ptx::mbarrier_init(&full[i], Copies::kFillArrivals);
      ptx::mbarrier_init(&empty[i], kTeamWarps);
    }
    Copies::fence_barriers();
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

// The value that lane `lane` of the warp holds.
template <class T> __device__ __forceinline__ T of_lane(const T& value, uint32_t lane) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 4 == 0, "sent by words of 4 bytes");
  struct Words {
    uint32_t word[sizeof(T) / 4];
  };
  Words w = __builtin_bit_cast(Words, value);
#pragma unroll
  for (uint32_t i = 0; i < sizeof(T) / 4; ++i) w.word[i] = __shfl_sync(~0u, w.word[i], int(lane));
  return __builtin_bit_cast(T, w);
}
// The copying warp's view, without the copy engine: all lanes copy each chunk. The functions have the meaning of
// WeightWriter's.
class LaneWeightWriter {
 public:
  __device__ __forceinline__ LaneWeightWriter(const WeightRing& ring, WeightStreamMemory& m, char* slots)
      : ring_(ring), m_(m), slots_(slots) {}
  __device__ __forceinline__ void put(uint32_t lane, const uint8_t* from, uint32_t bytes, const WeightNote& note) {
    struct Source {
      const uint8_t* from;
      uint32_t bytes, unused;
    };
    put_pieces(lane, bytes, note, ring_.ahead, Source{from, bytes, 0},
               [](char* slot, const Source& s, auto&& load) { load(slot, s.from, s.bytes); });
  }
  template <class Source, class Copy>
  __device__ __forceinline__ void put_pieces(uint32_t lane, uint32_t, const WeightNote& note, uint32_t ahead,
                                             const Source& source, Copy&& copy) {
    // Both barriers are tested before either is waited for, because a test takes as long as several copies.
    const bool throttled = under_way_ >= ahead && under_way_ < ring_.slots;
    const bool is_empty = LaneCopies::has_completed(&m_.empty[at_.slot], at_.phase ^ 1),
               is_full = !throttled || LaneCopies::has_completed(&m_.full[oldest_.slot], oldest_.phase);
    if (!is_empty) LaneCopies::wait(&m_.empty[at_.slot], at_.phase ^ 1);
    if (!is_full) LaneCopies::wait(&m_.full[oldest_.slot], oldest_.phase);
#pragma unroll 1
    for (bool waited = throttled; under_way_ >= ahead; --under_way_, waited = false) {
      // With a chunk in every slot the oldest chunk was in this slot, which has been read.
      if (!waited && under_way_ < ring_.slots) LaneCopies::wait(&m_.full[oldest_.slot], oldest_.phase);
      oldest_.advance(ring_.slots);
    }
    ++under_way_;
    uint64_t* const full = &m_.full[at_.slot];
    copy(slots_ + at_.slot * kLaneSlotBytes, of_lane(source, lane), [&](char* to, const void* from, uint32_t bytes) {
      constexpr uint32_t kStep = 32 * 16, kSteps = 4;  // bytes of the warp's copies; copies of a lane at once
      const uint32_t begin = threadIdx.x % 32 * 16;
      uint32_t shared = ptx::shared_address(to) + begin;
      const char* mine = static_cast<const char*>(from) + begin;
#pragma unroll 1
      for (; bytes >= kSteps * kStep; bytes -= kSteps * kStep, shared += kSteps * kStep, mine += kSteps * kStep)
#pragma unroll
        for (uint32_t u = 0; u < kSteps; ++u) ptx::cp_async_16(shared + u * kStep, mine + u * kStep);
#pragma unroll 1
      for (uint32_t at = begin; at < bytes; at += kStep, shared += kStep, mine += kStep) ptx::cp_async_16(shared, mine);
    });
    ptx::arrive_after_copies(full);
    if (threadIdx.x % 32 == lane) {
      m_.note[at_.slot] = note;
      LaneCopies::arrive(full);
    }
    at_.advance(ring_.slots);
  }

 private:
  const WeightRing ring_;
  WeightStreamMemory& m_;
  char* const slots_;
  RingPlace at_, oldest_;
  uint32_t under_way_ = 0;
};
template <class Copies>
using WeightWriterBy = std::conditional_t<std::is_same_v<Copies, LaneCopies>, LaneWeightWriter, WeightWriter>;

// A reading warp's view: team `team` of `teams` takes every teams-th chunk, regardless of the matrix.
template <class Copies> class WeightReaderBy {
 public:
  __device__ __forceinline__ WeightReaderBy(const WeightRing& ring, WeightStreamMemory& m, const char* slots,
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
  // The same in two calls: load(weights, note) copies the team's chunk into registers, and use(note) follows when the
  // slot is free again.
  template <class Load, class Use> __device__ __forceinline__ void read_early(uint32_t count, Load&& load, Use&& use) {
#pragma unroll 1
    while (turn_ < count) {
      WeightNote note;
      take([&](const char* weights, const WeightNote& of_slot) {
        note = of_slot;
        load(weights, note);
      });
      use(note);
    }
    turn_ -= count;
  }
  // The index of this team's next chunk, counted from the present position.
  __device__ __forceinline__ uint32_t turn() const { return turn_; }
  // Takes the first of these chunks, ahead of read() with the same count.
  template <class Use> __device__ __forceinline__ void read_one(uint32_t count, Use&& use) {
    if (turn_ < count) take(use);
  }
  // Call after read_one() has taken all of this team's chunks among the next `count`.
  __device__ __forceinline__ void finish(uint32_t count) { turn_ -= count; }

 private:
  template <class Use> __device__ __forceinline__ void take(Use&& use) {
    Copies::wait(&m_.full[at_.slot], at_.phase);
    use(slots_ + at_.slot * Copies::kSlotBytes, m_.note[at_.slot]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) Copies::arrive(&m_.empty[at_.slot]);
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
using WeightReader = WeightReaderBy<EngineCopies>;

}  // namespace ingot::megakernel
