#include "ingot/io/codecs/integer_coder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "ingot/core/check.h"
#include "ingot/core/rng.h"

namespace ingot {
namespace {

std::vector<int8_t> gaussian(int64_t n, int bits, double sigma, uint64_t seed) {
  const Rng rng(seed, Purpose::test);
  const double qmax = double((1 << (bits - 1)) - 1);
  std::vector<int8_t> values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i)
    values[size_t(i)] = int8_t(std::clamp(std::nearbyint(sigma * rng.normal(uint64_t(i))), -qmax, qmax));
  return values;
}

double entropy_bytes(const std::vector<int8_t>& values) {
  std::map<int8_t, double> counts;
  for (const int8_t v : values) counts[v] += 1;
  double bits = 0;
  for (const auto& [value, count] : counts) bits -= count * std::log2(count / double(values.size()));
  return bits / 8;
}

std::string decode_error(std::string_view bytes, int64_t count, int bits) {
  try {
    decode_integers(bytes, count, bits, "model.ingot: blocks.0.attn.q");
  } catch (const Error& e) {
    EXPECT_EQ(e.code, ErrorCode::bad_data);
    return e.what();
  }
  return "no error";
}

TEST(IntegerCoder, RoundTrip) {
  for (const int bits : {2, 3, 4, 5, 6, 7, 8})
    for (const int64_t n : {0, 1, 2, 1000, 70000})
      for (const double sigma : {0.0, 0.3, 2.4, 100.0}) {
        const auto values = gaussian(n, bits, sigma, uint64_t(bits + n));
        EXPECT_EQ(decode_integers(encode_integers(values, bits), n, bits, "t"), values)
            << bits << ", " << n << ", " << sigma;
      }
}

// Long rows of the likelier value, broken by the unlikely value, through which carries propagate. 2,000 different
// sequences.
TEST(IntegerCoder, RoundTripOfSurprises) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    const Rng rng(seed, Purpose::test, 1);
    std::vector<int8_t> values(200 + seed % 100);
    for (size_t i = 0; i < values.size(); ++i) values[i] = rng.below(i, 40 + seed % 400) == 0 ? int8_t(1) : int8_t(-1);
    ASSERT_EQ(decode_integers(encode_integers(values, 2), int64_t(values.size()), 2, "t"), values) << seed;
  }
}

// Matrices at 12.85 sigmas in int6 and an embedding at 20 in int8, as in `golf`: within 0.1% of the entropy of the
// frequencies.
TEST(IntegerCoder, ComesCloseToTheEntropy) {
  for (const auto& [bits, sigma] : {std::pair{6, 31 / 12.85}, {8, 127 / 20.0}}) {
    const auto values = gaussian(1 << 19, bits, sigma, 7);
    const double found = double(encode_integers(values, bits).size()), least = entropy_bytes(values);
    EXPECT_LT(found, 1.001 * least + 100) << bits;
    EXPECT_GT(found, 0.999 * least) << bits;
  }
}

TEST(IntegerCoder, BadBytesAreNamed) {
  const auto values = gaussian(1000, 6, 2.4, 1);
  const std::string bytes = encode_integers(values, 6);
  for (size_t cut = 0; cut < bytes.size(); ++cut)
    ASSERT_NE(decode_error(std::string_view(bytes).substr(0, cut), 1000, 6), "no error") << cut;
  EXPECT_EQ(decode_error(bytes + "x", 1000, 6),
            "model.ingot: blocks.0.attn.q: found " + std::to_string(bytes.size() + 1) +
                " bytes of coded integers, expected " + std::to_string(bytes.size()));
  EXPECT_NE(decode_error(bytes, int64_t(1) << 60, 6).find("blocks.0.attn.q"), std::string::npos);
  EXPECT_NE(decode_error(std::string(8, '\xff'), 1, 2).find("coded integer 0 is 2, expected -1 to 1"),
            std::string::npos);
}

TEST(IntegerCoder, SymbolsAreTakenFromTheFront) {
  const std::vector<uint8_t> first = {0, 255, 7, 7, 128}, second = {1, 0, 1};
  const std::string both = encode_symbols(first, 8) + encode_symbols(second, 1) + "rest";
  std::string_view left = both;
  EXPECT_EQ(decode_symbols(left, 5, 8, "t"), first);
  EXPECT_EQ(decode_symbols(left, 3, 1, "t"), second);
  EXPECT_EQ(left, "rest");
}

TEST(IntegerCoder, OnlyIntegersInRangeAreEncoded) {
  EXPECT_THROW(encode_symbols(std::vector<uint8_t>{2}, 1), Error);
  EXPECT_THROW(encode_integers(std::vector<int8_t>{32}, 6), Error);
  EXPECT_THROW(encode_integers(std::vector<int8_t>{0}, 9), Error);
}

}  // namespace
}  // namespace ingot
