#include "ingot/io/codecs/compress.h"

#include <gtest/gtest.h>

#include "ingot/core/rng.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

TEST(compress, gzip_sizes_are_those_of_the_format) {
  EXPECT_EQ(gzip_size(""), 20);  // 10 bytes header, 2 of an empty block, 8 trailer
  EXPECT_LT(gzip_size(std::string(100000, 'a')), 200);
  std::string noise;
  const Rng rng(1, Purpose::test);
  for (uint64_t i = 0; i < 100000; ++i) noise += char(rng.bits(i));
  EXPECT_GT(gzip_size(noise), 100000);
  EXPECT_LT(gzip_size(noise), 100100);
}

TEST(compress, a_tool_gets_its_input_and_its_output_is_counted) {
  EXPECT_EQ(tool_output_size({"cat"}, ""), 0);
  const std::string big(3'000'000, 'x');  // far beyond the capacity of a pipe
  EXPECT_EQ(tool_output_size({"cat"}, big), 3'000'000);
  EXPECT_EQ(tool_output_size({"head", "-c", "5"}, big), 5);  // stops reading early
  EXPECT_EQ(tool_output_size({"no-such-program-here"}, "x"), std::nullopt);
  EXPECT_NE(testing::error_of([] { tool_output_size({"false"}, "x"); }).find("exit status 1"), std::string::npos);
  EXPECT_EQ(tool_output_size({"echo", "$HOME; ls"}, ""), 10);  // no shell
}

TEST(compress, xz_counts_its_own_format) {
  const auto size = xz_size(std::string(100000, 'a'));
  if (!size) GTEST_SKIP() << "xz is not installed";
  EXPECT_GT(*size, 32);
  EXPECT_LT(*size, 200);
}

}  // namespace
}  // namespace ingot
