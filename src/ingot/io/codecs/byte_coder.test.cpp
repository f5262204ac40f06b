#include "ingot/io/codecs/byte_coder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ingot/core/rng.h"
#include "ingot/io/codecs/integer_coder.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

constexpr ByteCoder kCoders[] = {ByteCoder::brotli, ByteCoder::lzma};

std::string some_bytes(size_t n, uint64_t values) {
  const Rng rng(n, Purpose::test);
  std::string bytes;
  for (uint64_t i = 0; i < n; ++i) bytes.push_back(char(rng.below(i, values)));
  return bytes;
}

TEST(ByteCoder, EncodedBytesDecodeToTheSame) {
  for (const ByteCoder c : kCoders) {
    if (!has_byte_coder(c)) continue;
    for (const size_t n : {0, 1, 2, 3, 1000, 100001})
      for (const uint64_t values : {1, 3, 256}) {
        const std::string bytes = some_bytes(n, values);
        EXPECT_EQ(decode_bytes(c, encode_bytes(c, bytes), int64_t(n), "t"), bytes) << name_of(c) << ' ' << n;
      }
    // The halves of 16-bit numbers are separated: a constant half compresses to nothing.
    std::string halves = some_bytes(20000, 256);
    for (size_t i = 1; i < halves.size(); i += 2) halves[i] = 7;
    EXPECT_LT(encode_bytes(c, halves).size(), 10400u) << name_of(c);
  }
}

TEST(ByteCoder, CutLengthenedOrOfAnotherSizeIsRefused) {
  const std::string bytes = some_bytes(3000, 40);
  for (const ByteCoder c : kCoders) {
    if (!has_byte_coder(c)) continue;
    const std::string whole = encode_bytes(c, bytes);
    const auto refused = [&](std::string_view coded, int64_t size) {
      return testing::error_of([&] { decode_bytes(c, coded, size, "a.ingot"); }).find("a.ingot: found bytes") !=
             std::string::npos;
    };
    EXPECT_FALSE(refused(whole, 3000));
    for (const int64_t size : {0, 2999, 3001, 100000}) EXPECT_TRUE(refused(whole, size)) << name_of(c) << ' ' << size;
    EXPECT_TRUE(refused(whole + "x", 3000)) << name_of(c);
    for (size_t n = 0; n < whole.size(); n += 13) EXPECT_TRUE(refused(whole.substr(0, n), 3000)) << name_of(c);
    EXPECT_TRUE(refused(bytes, 3000)) << name_of(c);
  }
}

// Numbers of a normal distribution, as int6 weights of 12.85 deviations are: a matrix of golf's. bench/coders.py
// measures a whole model.
TEST(ByteCoder, TakesMoreBytesForWeightsThanTheRangeCoder) {
  const Rng rng(3, Purpose::test);
  std::vector<int8_t> weights(512 * 512);
  for (size_t i = 0; i < weights.size(); ++i)
    weights[i] = int8_t(std::clamp(std::nearbyint(31 / 12.85 * rng.normal(i)), -31.0, 31.0));
  const size_t range = encode_integers(weights, 6).size();
  for (const ByteCoder c : kCoders)
    if (has_byte_coder(c))
      EXPECT_LT(double(range),
                0.995 * double(encode_bytes(c, {reinterpret_cast<const char*>(weights.data()), weights.size()}).size()))
          << name_of(c);
}

TEST(ByteCoder, ACoderThatWasNotBuiltIsNamed) {
  for (const ByteCoder c : kCoders)
    if (!has_byte_coder(c))
      EXPECT_NE(testing::error_of([&] { encode_bytes(c, "x"); })
                    .find(std::string("coder ") + name_of(c) +
                          ": this build lacks the library of the coder, expected another coder"),
                std::string::npos);
}

}  // namespace
}  // namespace ingot
