// An accepted artifact is the same when written and read again. The description's checksum is corrected, so altered
// descriptions and sizes are tested too.
#include "ingot/models/gpt/artifact/artifact.h"

#include "ingot/io/codecs/crc32c.h"
#include "ingot/testing/fuzz.h"

namespace {

std::string mended(std::string bytes) {
  if (bytes.size() < 20) return bytes;
  uint32_t length = 0;
  for (int i = 3; i >= 0; --i) length = length << 8 | uint8_t(bytes[size_t(12 + i)]);
  const uint32_t sum = ingot::crc32c(std::string_view(bytes).substr(20, length));
  for (int i = 0; i < 4; ++i) bytes[size_t(16 + i)] = char(sum >> (8 * i) & 255);
  return bytes;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string bytes = mended({reinterpret_cast<const char*>(data), size});
  return ingot::testing::refuse_or_accept([&] {
    const ingot::Artifact a = ingot::parse_artifact(bytes, "input");
    const std::string again = ingot::artifact_bytes(a);
    FUZZ_REQUIRE(ingot::artifact_bytes(ingot::parse_artifact(again, "again")) == again);
  });
}
