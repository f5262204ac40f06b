#include "ingot/models/decode/megakernel/token_kernel_form.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string_view>

#include "ingot/megakernel/weight_stream.h"

namespace ingot::decode {
namespace {

constexpr int64_t kKiB = 1024;

TEST(TokenKernelForm, FollowsFromTheLimitsOfAGpu) {
  const auto form = [](const char* capability) { return token_kernel_form(gpu::limits_of(capability)); };
  EXPECT_EQ(form("9.0"), (TokenKernelForm{TokenCopies::engine, 226 * kKiB}));
  EXPECT_EQ(form("10.0"), (TokenKernelForm{TokenCopies::engine, 226 * kKiB}));
  EXPECT_EQ(form("8.0"), (TokenKernelForm{TokenCopies::lanes, 162 * kKiB}));
  for (const char* small : {"8.6", "8.9", "12.0"})
    EXPECT_EQ(form(small), (TokenKernelForm{TokenCopies::lanes, 98 * kKiB})) << small;
  gpu::Limits by_ptx = gpu::limits_of("9.0");
  by_ptx.hopper = false;
  EXPECT_EQ(token_kernel_form(by_ptx), form("9.0")) << "the PTX for compute_90";
  gpu::Limits turing = gpu::limits_of("8.6");
  turing.capability = 75;
  EXPECT_EQ(token_kernel_form(turing).copies, TokenCopies::none);
}

TEST(TokenKernelForm, IsTheDefaultOnHopperAndElsewhereAsked) {
  for (const char* variable : {"", "0", "1"}) {
    EXPECT_TRUE(prefers_token_kernel(gpu::limits_of("9.0"), variable));
    for (const char* capability : {"8.0", "8.6", "8.9", "10.0", "12.0"})
      EXPECT_EQ(prefers_token_kernel(gpu::limits_of(capability), variable), variable == std::string_view("1"))
          << capability;
  }
}

// A team reads all fills of a slot, and no more chunks are in flight than there are slots.
TEST(RingOfSmallSlots, IsAMultipleOfTheTeamsThatFits) {
  using namespace megakernel;
  for (int64_t bytes = -kLaneSlotBytes; bytes < 200 * kKiB; bytes += 512) {
    const WeightRing ring = ring_of_small_slots(bytes);
    EXPECT_EQ(ring.slots % kTeams, 0u) << bytes;
    EXPECT_LE(int64_t(ring.slots) * kLaneSlotBytes, std::max<int64_t>(bytes, 0)) << bytes;
    EXPECT_LE(ring.slots, kMostSlots) << bytes;
    EXPECT_LE(ring.ahead, ring.slots) << bytes;
    EXPECT_EQ(ring.ahead > 0, bytes >= int64_t(kTeams) * kLaneSlotBytes) << bytes;
  }
}

}  // namespace
}  // namespace ingot::decode
