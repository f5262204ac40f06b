#pragma once
// What a kernel is told of the GPUs that work on the same token as its own (exchange.cuh).
#include <cstdint>

#include "ingot/core/hd.h"

namespace ingot::megakernel {

constexpr uint32_t kMostRanks = 8;

// The ranks of one process, a GPU each, that write into each other's memory. Every rank has an inbox of words
// {number's bits, epoch} that begin as zeros: kTurns times (ranks, words), then two words of each rank for its
// likeliest id, then one of each for the last exchange whose part lies ready in that rank's own memory. Exchanges are
// numbered from 1; that of number `epoch` takes turn epoch % kTurns.
struct Exchange {
  // A rank may be a whole layer's two exchanges ahead of one that it gets no sums from and that has not read what it
  // sent two exchanges ago.
  static constexpr uint32_t kTurns = 4;

  uint32_t rank = 0, ranks = 1;
  uint32_t words = 0;             // of a rank's part of an exchange, at most
  uint32_t* epoch = nullptr;      // of the last exchange there was; each rank has its own
  uint64_t* inbox[kMostRanks]{};  // of every rank, this one's too
  uint32_t* stop[kMostRanks]{};   // of every rank's Watch

  INGOT_HD int64_t place(uint32_t number, uint32_t from) const {
    return (int64_t(number % kTurns) * ranks + from) * words;
  }
  INGOT_HD int64_t likeliest_place(uint32_t from) const { return int64_t(kTurns) * ranks * words + 2 * from; }
  // In `inbox` of any rank: what `from` says of its parts.
  INGOT_HD uint32_t* ready(uint32_t at, uint32_t from) const {
    return reinterpret_cast<uint32_t*>(inbox[at] + likeliest_place(ranks) + from);
  }
  INGOT_HD static int64_t inbox_words(uint32_t ranks, uint32_t words) {
    return int64_t(kTurns) * ranks * words + 3 * ranks;
  }
};

// In WaitRecord::what: which rank a wait was for, beside what it was for. 0: none in particular.
constexpr uint32_t kRankShift = 24;
INGOT_HD constexpr uint32_t wait_for_rank(uint32_t what, uint32_t rank) { return what | (rank + 1) << kRankShift; }

}  // namespace ingot::megakernel
