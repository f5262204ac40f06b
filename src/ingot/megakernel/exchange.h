#pragma once
// A kernel's description of the GPUs that compute the same token (exchange.cuh).
#include <cstdint>

#include "ingot/core/hd.h"

namespace ingot::megakernel {

constexpr uint32_t kMostRanks = 8;

// The ranks of a process, each on its own GPU, write into each other's memory. Every rank has an inbox of words {bits
// of the number, epoch}, which are zero at first: kTurns times (ranks, words). The inbox is followed by two words per
// rank for the rank's likeliest id, then by one word per rank for the last exchange with a ready part in this rank's
// own memory. Exchanges are numbered from 1; exchange `epoch` uses turn epoch % kTurns.
struct Exchange {
  // A rank that needs no sums of a layer's first exchange can fall behind: another rank may be two exchanges (a whole
  // layer) ahead, while the slower rank has not yet read the words of two exchanges ago.
  static constexpr uint32_t kTurns = 4;

  uint32_t rank = 0, ranks = 1;
  uint32_t words = 0;             // the most words of a rank's part of an exchange
  uint32_t* epoch = nullptr;      // the number of the last exchange; each rank has its own copy
  uint64_t* inbox[kMostRanks]{};  // of every rank, this rank included
  uint32_t* stop[kMostRanks]{};   // of every rank's Watch

  INGOT_HD int64_t place(uint32_t number, uint32_t from) const {
    return (int64_t(number % kTurns) * ranks + from) * words;
  }
  INGOT_HD int64_t likeliest_place(uint32_t from) const { return int64_t(kTurns) * ranks * words + 2 * from; }
  // The word in the inbox of rank `at` by which rank `from` announces its own part: the number of the last exchange
  // whose part is ready in the memory of rank `from`.
  INGOT_HD uint32_t* ready(uint32_t at, uint32_t from) const {
    return reinterpret_cast<uint32_t*>(inbox[at] + likeliest_place(ranks) + from);
  }
  INGOT_HD static int64_t inbox_words(uint32_t ranks, uint32_t words) {
    return int64_t(kTurns) * ranks * words + 3 * ranks;
  }
};

// In WaitRecord::what: the awaited rank, beside the reason of the wait. 0: no particular rank.
constexpr uint32_t kRankShift = 24;
INGOT_HD constexpr uint32_t wait_for_rank(uint32_t what, uint32_t rank) { return what | (rank + 1) << kRankShift; }

}  // namespace ingot::megakernel
