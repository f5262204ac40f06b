#include "ingot/kernels/attention/claim_slots.h"

#include <gtest/gtest.h>

#include <set>

namespace ingot::cuda::attention_hopper {
namespace {

TEST(ClaimSlots, AStreamKeepsItsSlotAndStreamsBeyondTheSlotsHaveNone) {
  ClaimSlots slots;
  std::set<uint32_t> given;
  for (uint64_t id = 0; id < kStreamSlots; ++id) given.insert(slots.of_stream(7 * id));
  EXPECT_EQ(given.size(), kStreamSlots);
  EXPECT_LT(*given.rbegin(), kStreamSlots);
  EXPECT_EQ(slots.of_stream(1), kNoCounter);
  EXPECT_EQ(slots.of_stream(2), kNoCounter);
  EXPECT_EQ(slots.of_stream(7), slots.of_stream(7));
  EXPECT_NE(slots.of_stream(7), kNoCounter);
  EXPECT_LT(slots.of_recorded(), kNoCounter);
}

TEST(ClaimSlots, RecordedLaunchesKeepASlotUntilItIsReturned) {
  ClaimSlots slots;
  std::set<uint32_t> given;
  for (uint32_t i = kStreamSlots; i < kNoCounter; ++i) given.insert(slots.of_recorded());
  EXPECT_EQ(given.size(), kNoCounter - kStreamSlots);
  EXPECT_EQ(*given.begin(), kStreamSlots);
  EXPECT_LT(*given.rbegin(), kNoCounter);
  EXPECT_EQ(slots.of_recorded(), kNoCounter);
  slots.give_back(5000);
  EXPECT_EQ(slots.of_recorded(), 5000u);
  EXPECT_EQ(slots.of_recorded(), kNoCounter);
}

}  // namespace
}  // namespace ingot::cuda::attention_hopper
