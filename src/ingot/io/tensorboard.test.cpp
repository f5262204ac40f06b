#include "ingot/io/tensorboard.h"

#include <gtest/gtest.h>

#include <cstring>

#include "ingot/io/codecs/crc32c.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

TEST(crc32c, equals_the_published_examples) {
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xE3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8A9136AAu);  // RFC 3720, B.4
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62A8AB43u);
}

// tests/tensorboard_test.py reads such files with TensorBoard itself; here are the bytes of a number's record.
TEST(tensorboard, the_record_of_a_number_has_the_bytes_of_the_format) {
  const testing::TemporaryDirectory dir;
  TensorBoard board(dir.path() + "/a/b", 0);
  const int64_t before = file_size(board.path());
  board.write(300, {{"loss", 1.5}});
  const std::string bytes = read_file(board.path()).substr(size_t(before));
  const std::string head("\x1b\0\0\0\0\0\0\0", 8);  // 27 bytes of event
  ASSERT_EQ(bytes.size(), 8u + 4 + 27 + 4);
  EXPECT_EQ(bytes.substr(0, 8), head);
  EXPECT_EQ(bytes.substr(8 + 4, 1), "\x09");                                       // the time, 8 bytes
  EXPECT_EQ(bytes.substr(8 + 4 + 9, 3), std::string("\x10\xac\x02"));              // step 300
  EXPECT_EQ(bytes.substr(8 + 4 + 12, 4), std::string("\x2a\x0d\x0a\x0b"));         // a summary of a single value
  EXPECT_EQ(bytes.substr(8 + 4 + 16, 6), std::string("\x0a\x04loss"));             // its tag
  EXPECT_EQ(bytes.substr(8 + 4 + 22, 5), std::string("\x15\x00\x00\xc0\x3f", 5));  // 1.5f
  const auto crc_at = [&](size_t at) {
    uint32_t c;
    std::memcpy(&c, bytes.data() + at, 4);
    c -= 0xa282ead8u;
    return c >> 17 | c << 15;
  };
  EXPECT_EQ(crc_at(8), crc32c(head));
  EXPECT_EQ(crc_at(8 + 4 + 27), crc32c(bytes.substr(12, 27)));
}

}  // namespace
}  // namespace ingot
