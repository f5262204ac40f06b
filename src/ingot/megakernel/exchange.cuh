#pragma once
// Sums over several GPUs. Each rank writes its part into the memory of all ranks, itself included. Every number travels
// in a word together with the epoch of the exchange, so each word carries its own ready flag. The reader waits for the
// words and adds the numbers in the order of ranks, so all ranks get the same bits.
//     send(x, epoch, i, value);                                        // number i of this rank's part
//     const float sum = sum_of_ranks<1>(x, from, epoch, i, 0, watch, what);
// For many numbers, a rank may instead write its part to its own memory, which the ranks read:
//     say_ready(x, epoch);                          // one thread, after the kernel with the writes
//     wait_for_ready(x, epoch, rank, watch, what);  // one thread, before the block reads the part of `rank`
// The memory of a part may be overwritten two exchanges later: before a rank announces an exchange as ready, this rank
// has read the preceding exchange.
#include "ingot/gpu/tile/flag.cuh"
#include "ingot/megakernel/exchange.h"

namespace ingot::megakernel {

__device__ __forceinline__ uint64_t word_of(uint32_t bits, uint32_t epoch) { return uint64_t(epoch) << 32 | bits; }

__device__ __forceinline__ void send(const Exchange& x, uint32_t epoch, uint32_t i, float value) {
  const uint64_t word = word_of(__float_as_uint(value), epoch);
  const int64_t at = x.place(epoch, x.rank) + i;
#pragma unroll 1
  for (uint32_t r = 0; r < x.ranks; ++r) ptx::store_relaxed_system(x.inbox[r] + at, word);
}

// The sum of number i over the ranks in `from` (one bit each). Each rank has kParts parts, `stride` numbers apart. The
// record of the watch gets `what` and the awaited rank. The sum is meaningless after a failed wait.
template <uint32_t kParts>
__device__ __forceinline__ float sum_of_ranks(const Exchange& x, uint32_t from, uint32_t epoch, uint32_t i,
                                              uint32_t stride, const gpu::Watch& watch, uint32_t what) {
  constexpr uint32_t kHeld = 2;  // ranks whose words are loaded at the same time
  const uint64_t* const inbox = x.inbox[x.rank] + i;
  float sum = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < x.ranks; first += kHeld) {
    uint64_t word[kHeld][kParts];
    uint32_t missing = 0, seen = 0;
    tile::wait_until(
        [&] {
          bool all = true;
#pragma unroll
          for (uint32_t u = 0; u < kHeld; ++u)
#pragma unroll
            for (uint32_t p = 0; p < kParts; ++p)
              word[u][p] = from >> (first + u) & 1
                               ? ptx::load_relaxed_system(inbox + x.place(epoch, first + u) + p * stride)
                               : word_of(0, epoch);
#pragma unroll
          for (uint32_t u = 0; u < kHeld; ++u)
#pragma unroll
            for (uint32_t p = 0; p < kParts; ++p)
              if (uint32_t(word[u][p] >> 32) != epoch)
                all = false, missing = wait_for_rank(what, first + u), seen = uint32_t(word[u][p] >> 32);
          return all;
        },
        [&] { return seen; }, epoch, watch, missing);
#pragma unroll
    for (uint32_t u = 0; u < kHeld; ++u) {
      float of_rank = __uint_as_float(uint32_t(word[u][0]));
#pragma unroll
      for (uint32_t p = 1; p < kParts; ++p) of_rank += __uint_as_float(uint32_t(word[u][p]));
      sum += of_rank;
    }
  }
  return sum;
}

// The largest key of the ranks in `from`, which may include this rank. Called by a single thread of each rank.
__device__ __forceinline__ uint64_t largest_of_ranks(const Exchange& x, uint32_t from, uint32_t epoch, uint64_t mine,
                                                     const gpu::Watch& watch, uint32_t what) {
  if (from >> x.rank & 1)
#pragma unroll 1
    for (uint32_t r = 0; r < x.ranks; ++r) {
      uint64_t* const to = x.inbox[r] + x.likeliest_place(x.rank);
      ptx::store_relaxed_system(to, word_of(uint32_t(mine), epoch));
      ptx::store_relaxed_system(to + 1, word_of(uint32_t(mine >> 32), epoch));
    }
  uint64_t largest = 0;
#pragma unroll 1
  for (uint32_t r = 0; r < x.ranks; ++r) {
    if ((from >> r & 1) == 0) continue;
    const uint64_t* const at = x.inbox[x.rank] + x.likeliest_place(r);
    uint64_t low = 0, high = 0;
    tile::wait_until(
        [&] {
          low = ptx::load_relaxed_system(at), high = ptx::load_relaxed_system(at + 1);
          return uint32_t(low >> 32) == epoch && uint32_t(high >> 32) == epoch;
        },
        [&] { return uint32_t(low >> 32); }, epoch, watch, wait_for_rank(what, r));
    const uint64_t key = uint64_t(uint32_t(high)) << 32 | uint32_t(low);
    largest = key > largest ? key : largest;
  }
  return largest;
}

// Announces to all ranks that this rank's part of exchange `epoch` is ready. Earlier kernels of the stream must have
// written the part.
__device__ __forceinline__ void say_ready(const Exchange& x, uint32_t epoch) {
#pragma unroll 1
  for (uint32_t r = 0; r < x.ranks; ++r) ptx::store_release_system(x.ready(r, x.rank), epoch);
}
// Waits until `rank` has announced its part of exchange `epoch`. A rank may be one exchange ahead, and no more. The
// comparison therefore also holds when the numbers of exchanges wrap around.
__device__ __forceinline__ void wait_for_ready(const Exchange& x, uint32_t epoch, uint32_t rank,
                                               const gpu::Watch& watch, uint32_t what) {
  const uint32_t* const word = x.ready(x.rank, rank);
  uint32_t seen = 0;
  tile::wait_until([&] { return (seen = ptx::load_acquire_system(word)) - epoch <= 1; }, [&] { return seen; }, epoch,
                   watch, wait_for_rank(what, rank));
}

// Called by a single thread of a block, before the end of a kernel: after a failed wait on this rank, the waits of all
// ranks give up.
__device__ __forceinline__ void pass_on_stop(const Exchange& x, const gpu::Watch& watch) {
  if (!tile::stopped(watch)) return;
  for (uint32_t r = 0; r < x.ranks; ++r)
    if (r != x.rank) ptx::store_relaxed_system(x.stop[r], uint32_t(gpu::kStoppedByPeer));
}

}  // namespace ingot::megakernel
