// An accepted config is in range, and is the same after it is written and read again.
#include "ingot/models/gpt_oss/config.h"
#include "ingot/testing/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return ingot::testing::refuse_or_accept([&] {
    const auto c =
        ingot::gpt_oss_config_from_json(std::string(reinterpret_cast<const char*>(data), size), "config.json");
    FUZZ_REQUIRE(c.layers >= 1 && c.layers <= 4096 && c.sliding.size() == size_t(c.layers));
    FUZZ_REQUIRE(c.heads % c.kv_heads == 0 && c.experts_per_token <= c.experts);
    const std::string text = ingot::to_json(c);
    FUZZ_REQUIRE(ingot::to_json(ingot::gpt_oss_config_from_json(text, "again")) == text);
  });
}
