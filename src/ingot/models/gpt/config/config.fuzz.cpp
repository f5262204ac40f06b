// An accepted config passes its own check, and is unchanged when written and read again.
#include "ingot/models/gpt/config/config.h"

#include "ingot/testing/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  return ingot::testing::refuse_or_accept([&] {
    const ingot::GptConfig config =
        ingot::gpt_config_from_json(std::string(reinterpret_cast<const char*>(data), size), "f");
    ingot::check(config);
    const std::string text = ingot::to_json(config);
    FUZZ_REQUIRE(ingot::to_json(ingot::gpt_config_from_json(text, "again")) == text);
  });
}
