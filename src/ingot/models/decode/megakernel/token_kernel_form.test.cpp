#include "ingot/models/decode/megakernel/token_kernel_form.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>

#include "ingot/megakernel/warp_ring.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot::decode {
namespace {

constexpr int64_t kKiB = 1024;

TEST(TokenKernelForm, FollowsFromTheLimitsOfAGpu) {
  const auto form = [](const char* capability) { return token_kernel_form(gpu::limits_of(capability)); };
  EXPECT_EQ(form("9.0"), (TokenKernelForm{TokenCopies::engine, 226 * kKiB}));
  EXPECT_EQ(form("10.0"), (TokenKernelForm{TokenCopies::engine, 226 * kKiB}));
  EXPECT_EQ(form("8.0"), (TokenKernelForm{TokenCopies::warps, 162 * kKiB}));
  for (const char* small : {"8.6", "8.9", "12.0"})
    EXPECT_EQ(form(small), (TokenKernelForm{TokenCopies::warps, 98 * kKiB})) << small;
  gpu::Limits by_ptx = gpu::limits_of("9.0");
  by_ptx.hopper = false;
  EXPECT_EQ(token_kernel_form(by_ptx), form("9.0")) << "the PTX for compute_90";
  gpu::Limits turing = gpu::limits_of("8.6");
  turing.capability = 75;
  EXPECT_EQ(token_kernel_form(turing).copies, TokenCopies::none);
}

TEST(TokenKernelForm, IsTheDefaultOnEveryGpuThatHasOneUnlessTheVariableIsZero) {
  for (const char* capability : {"8.0", "8.6", "8.9", "9.0", "10.0", "12.0"}) {
    for (const char* variable : {"", "1"})
      EXPECT_TRUE(prefers_token_kernel(gpu::limits_of(capability), variable)) << capability;
    EXPECT_FALSE(prefers_token_kernel(gpu::limits_of(capability), "0")) << capability;
  }
  gpu::Limits turing = gpu::limits_of("8.6");
  turing.capability = 75;
  EXPECT_FALSE(prefers_token_kernel(turing, "1"));
}
TEST(TokenKernelForm, AWrongValueOfTheVariableIsRefusedOnEveryGpu) {
  for (const char* wrong : {"2", "yes", "true", " 1", "01"}) {
    const std::string expected = "usage: INGOT_MEGAKERNEL: found '" + std::string(wrong) + "', expected 0 or 1";
    EXPECT_EQ(testing::error_of([&] { check_megakernel_variable(wrong); }), expected);
    for (const char* capability : {"8.0", "9.0", "10.0"})
      EXPECT_EQ(testing::error_of([&] { prefers_token_kernel(gpu::limits_of(capability), wrong); }), expected);
  }
  for (const char* right : {"", "0", "1"}) EXPECT_EQ(testing::error_of([&] { check_megakernel_variable(right); }), "");
}

TEST(RingsOfWarps, HaveTheMostSlotsThatFit) {
  using namespace megakernel;
  for (int64_t bytes = -4096; bytes < 200 * kKiB; bytes += 512) {
    const uint32_t slots = warp_slots(bytes, 15);
    EXPECT_LE(int64_t(slots) * 15 * kWarpSlotBytes, std::max<int64_t>(bytes, 0)) << bytes;
    EXPECT_EQ(slots > 0, bytes >= int64_t(kFewWarpSlots) * 15 * kWarpSlotBytes) << bytes;
    if (bytes >= int64_t(kManyWarpSlots) * 15 * kWarpSlotBytes) EXPECT_EQ(slots, kManyWarpSlots) << bytes;
  }
}

}  // namespace
}  // namespace ingot::decode
