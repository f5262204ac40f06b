// Accepted symbols are the same after coding and decoding; a count beyond the capacity of the bytes takes no memory.
// Input bytes: bits, then the count (2 bytes, or 2^60 if both are 255), then the coded bytes.
#include "ingot/io/codecs/integer_coder.h"

#include "ingot/testing/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 3) return 0;
  const int bits = 2 + data[0] % 7;
  const int64_t said = data[1] | data[2] << 8, count = said == 65535 ? int64_t(1) << 60 : said;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 3, size - 3);
  return ingot::testing::refuse_or_accept([&] {
    const auto values = ingot::decode_integers(bytes, count, bits, "input");
    FUZZ_REQUIRE(int64_t(values.size()) == count);
    FUZZ_REQUIRE(ingot::decode_integers(ingot::encode_integers(values, bits), count, bits, "again") == values);
  });
}
