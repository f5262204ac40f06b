// Accepted text is written and read back unchanged, and is no deeper than allowed.
#include "ingot/io/json.h"

#include "ingot/testing/fuzz.h"

namespace {
int depth_of(const ingot::Json& value) {
  int deepest = 0;
  if (value.is_structured())
    for (const ingot::Json& item : value) deepest = std::max(deepest, depth_of(item));
  return value.is_structured() ? deepest + 1 : 0;
}
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return ingot::testing::refuse_or_accept([&] {
    const ingot::Json value = ingot::parse_json({reinterpret_cast<const char*>(data), size}, "f");
    FUZZ_REQUIRE(depth_of(value) <= 64);
    const std::string text = ingot::write_json(value);
    FUZZ_REQUIRE(ingot::parse_json(text, "again") == value);
    FUZZ_REQUIRE(ingot::write_json(ingot::parse_json(text, "again")) == text);
  });
}
