#include "ingot/models/options.h"

#include <gtest/gtest.h>

namespace ingot {
namespace {

// A GPU with room for so many tokens of slots, each of which takes 1,000 tokens' room beside its context.
auto room_for(int64_t tokens) {
  return [tokens](int64_t slots, int64_t context) { return slots * (context + 1000) <= tokens; };
}
DecoderOptions chosen(int64_t tokens, int64_t slots = 0, int64_t context = 0, int64_t model_context = 131072) {
  return choose_slots({.context = context, .slots = slots, .fit_slots = true}, model_context, room_for(tokens));
}
void expect(const DecoderOptions& o, int64_t slots, int64_t context) {
  EXPECT_EQ(o.slots, slots);
  EXPECT_EQ(o.context, context);
}

TEST(Slots, ALongContextIsWorthLessThanManySlots) {
  expect(chosen(int64_t(1) << 30), 128, 131072);  // room for everything
  expect(chosen(64 * (131072 + 1000)), 64, 131072);
  expect(chosen(64 * (131072 + 1000) - 1), 127, 65536);
  expect(chosen(70 * (16384 + 1000)), 70, 16384);
  expect(chosen(int64_t(1) << 30, 0, 0, 4096), 128, 4096);
}
TEST(Slots, FewerSlotsAreTakenBeforeTheContextFallsBelowTheDefault) {
  expect(chosen(20 * (8192 + 1000)), 20, 8192);
  expect(chosen(8192 + 1000), 1, 8192);
  expect(chosen(8192 + 999), 1, 4096);
  expect(chosen(2 * (1024 + 1000)), 1, 2048);
  expect(chosen(1024 + 1000), 1, 1024);
  expect(chosen(10), 1, 8192);  // nothing fits: the check of the memory says so
  expect(chosen(3 * (2000 + 1000), 0, 0, 2000), 3, 2000);
}
TEST(Slots, GivenNumbersAreKept) {
  expect(chosen(int64_t(1) << 30, 16), 16, 131072);
  expect(chosen(16 * (32768 + 1000), 16), 16, 32768);
  expect(chosen(200 * (1024 + 1000), 200), 200, 1024);
  expect(chosen(50 * (3000 + 1000), 0, 3000), 50, 3000);
  expect(chosen(10, 0, 3000), 1, 3000);
  expect(chosen(10, 7, 3000), 7, 3000);
  expect(choose_slots({.context = 0, .slots = 2}, 4096, room_for(1)), 2, 0);  // not asked to choose
}
TEST(Slots, ACpuHasTheDefaultNumberOfSlots) {
  expect(with_default_slots({.slots = 0, .fit_slots = true}, 131072), kDefaultSlots, kDefaultContext);
  expect(with_default_slots({.slots = 0, .fit_slots = true}, 2000), kDefaultSlots, 2000);
  expect(with_default_slots({.context = 50, .slots = 9, .fit_slots = true}, 2000), 9, 50);
  expect(with_default_slots({.slots = 1}, 2000), 1, 0);
}

}  // namespace
}  // namespace ingot
