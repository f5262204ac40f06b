#include "ingot/megakernel/exchange.cuh"

#include <gtest/gtest.h>

#include <vector>

#include "ingot/gpu/emulation/grid.h"

namespace ingot::megakernel {
namespace {

// Two ranks; each is a thread of an emulated kernel.
struct TwoRanks {
  static constexpr uint32_t kWords = 4;
  std::vector<uint64_t> inbox[2];
  uint32_t epoch[2] = {}, stop[2] = {gpu::kRunning, gpu::kRunning}, host_stop = 0;
  gpu::WaitRecord record[2];
  Exchange of[2];

  TwoRanks() {
    for (uint32_t r = 0; r < 2; ++r) inbox[r].resize(size_t(Exchange::inbox_words(2, kWords)));
    for (uint32_t r = 0; r < 2; ++r) {
      of[r].rank = r, of[r].ranks = 2, of[r].words = kWords, of[r].epoch = &epoch[r];
      for (uint32_t q = 0; q < 2; ++q) of[r].inbox[q] = inbox[q].data(), of[r].stop[q] = &stop[q];
    }
  }
  gpu::Watch watch(uint32_t r) {
    return {.stop = &stop[r], .host_stop = &host_stop, .record = &record[r], .limit_ns = 100'000};
  }
  template <class Work> static void run(Work&& work) { emulation::run("exchange", {.grid = 1, .block = 1}, work); }
};

TEST(ExchangeEmulated, SumsAreInTheOrderOfRanksOnEveryRank) {
  TwoRanks two;
  TwoRanks::run([&] {
    for (uint32_t r = 0; r < 2; ++r)
      for (uint32_t i = 0; i < 2; ++i) send(two.of[r], 1, i, r == 0 ? 1e8f : -1e8f + 8 * float(i));
    for (uint32_t r = 0; r < 2; ++r)
      for (uint32_t i = 0; i < 2; ++i) EXPECT_EQ(sum_of_ranks<1>(two.of[r], 3, 1, i, 0, two.watch(r), 0), 8 * float(i));
    EXPECT_EQ(sum_of_ranks<1>(two.of[0], 2, 1, 0, 0, two.watch(0), 0), -1e8f) << "of the ranks in `from` alone";
  });
}

// As with --split attention-experts: the sending rank gets no sums from the slow rank until a layer later.
TEST(ExchangeEmulated, ARankThatIsALayerAheadOverwritesNoUnreadPart) {
  TwoRanks two;
  TwoRanks::run([&] {
    for (uint32_t epoch = 1; epoch <= 3; ++epoch) send(two.of[0], epoch, 0, float(epoch));
    for (uint32_t epoch = 1; epoch <= 3; ++epoch)
      EXPECT_EQ(sum_of_ranks<1>(two.of[1], 1, epoch, 0, 0, two.watch(1), 0), float(epoch));
  });
  EXPECT_EQ(two.stop[1], gpu::kRunning);
}

TEST(ExchangeEmulated, WordsOfAnotherExchangeAreNotTakenAndTheRankIsNamed) {
  TwoRanks two;
  TwoRanks::run([&] {
    send(two.of[0], 1, 0, 5);
    send(two.of[1], 1 + Exchange::kTurns, 0, 5);  // in the same place
    (void)sum_of_ranks<1>(two.of[0], 3, 1, 0, 0, two.watch(0), 7);
  });
  EXPECT_EQ(two.stop[0], gpu::kTimedOut);
  EXPECT_EQ(two.record[0].what, wait_for_rank(7, 1));
  EXPECT_EQ(two.record[0].expected, 1u);
  EXPECT_EQ(two.record[0].seen, 1 + Exchange::kTurns);
}

TEST(ExchangeEmulated, TheLikeliestOfAllRanksIsTheSameOnEachAndOfThisTokenAlone) {
  TwoRanks two;
  TwoRanks::run([&] {
    (void)largest_of_ranks(two.of[1], 2, 4, uint64_t(9) << 32 | 1, two.watch(1),
                           0);  // of a single rank: no wait
    EXPECT_EQ(largest_of_ranks(two.of[0], 3, 4, uint64_t(7) << 32, two.watch(0), 0), uint64_t(9) << 32 | 1);
    EXPECT_EQ(largest_of_ranks(two.of[1], 3, 4, uint64_t(9) << 32 | 1, two.watch(1), 0), uint64_t(9) << 32 | 1);
  });
  EXPECT_EQ(two.stop[0], gpu::kRunning);
  TwoRanks::run([&] { (void)largest_of_ranks(two.of[0], 3, 5, 1, two.watch(0), 3); });
  EXPECT_EQ(two.record[0].what, wait_for_rank(3, 1));
}

TEST(ExchangeEmulated, APartThatIsReadyOrALayerAheadEndsTheWait) {
  TwoRanks two;
  TwoRanks::run([&] {
    say_ready(two.of[1], 2);
    wait_for_ready(two.of[0], 1, 1, two.watch(0), 0);
    wait_for_ready(two.of[0], 2, 1, two.watch(0), 0);
    say_ready(two.of[1], 0);  // the numbers of exchanges wrap around
    wait_for_ready(two.of[0], ~0u, 1, two.watch(0), 0);
    say_ready(two.of[1], 2);
    EXPECT_EQ(two.stop[0], gpu::kRunning);
    wait_for_ready(two.of[0], 3, 1, two.watch(0), 5);
    pass_on_stop(two.of[0], two.watch(0));
  });
  EXPECT_EQ(two.record[0].what, wait_for_rank(5, 1));
  EXPECT_EQ(two.record[0].seen, 2u);
  EXPECT_EQ(two.stop[1], gpu::kStoppedByPeer);
  EXPECT_EQ(two.record[1].state, gpu::kRunning);
}

TEST(ExchangeEmulated, AMuchEarlierPartIsNotTakenForALaterOne) {
  TwoRanks two;
  TwoRanks::run([&] {
    say_ready(two.of[1], 2);
    wait_for_ready(two.of[0], 2 + 0x80000001u, 1, two.watch(0), 5);
  });
  EXPECT_EQ(two.record[0].what, wait_for_rank(5, 1));
  EXPECT_EQ(two.record[0].seen, 2u);
}

}  // namespace
}  // namespace ingot::megakernel
