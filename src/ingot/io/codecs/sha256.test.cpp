#include "ingot/io/codecs/sha256.h"

#include <gtest/gtest.h>

#include "ingot/io/file.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

TEST(sha256, the_standards_examples) {
  EXPECT_EQ(sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(sha256, pieces_of_any_length_give_the_same_digest) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += char(i * 7);
  const std::string whole = sha256(text);
  for (size_t piece = 1; piece < 200; ++piece) {
    Sha256 hash;
    for (size_t at = 0; at < text.size(); at += piece) hash.update(std::string_view(text).substr(at, piece));
    EXPECT_EQ(hash.hex(), whole) << piece;
  }
}

TEST(sha256, the_portable_rounds_agree_with_the_ones_in_use) {
  for (size_t n = 0; n < 260; n += 13) {
    std::string text(n, char(n));
    std::string padded = text + char(0x80);
    while (padded.size() % 64 != 56) padded += '\0';
    for (int i = 7; i >= 0; --i) padded += char(uint64_t(n * 8) >> (8 * i));
    uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                         0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    detail::sha256_blocks_portable(state, reinterpret_cast<const uint8_t*>(padded.data()), int64_t(padded.size() / 64));
    char hex[65];
    for (int i = 0; i < 8; ++i) std::snprintf(hex + 8 * i, 9, "%08x", state[i]);
    EXPECT_EQ(sha256(text), hex);
  }
}

TEST(sha256, a_file_has_the_digest_of_its_bytes) {
  const testing::TemporaryDirectory dir;
  const std::string bytes(3'000'001, 'q');
  write_file(dir / "f", bytes);
  EXPECT_EQ(sha256_of_file(dir / "f"), sha256(bytes));
}

}  // namespace
}  // namespace ingot
