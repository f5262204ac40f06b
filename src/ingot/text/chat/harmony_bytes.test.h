#pragma once
// A Harmony vocabulary for tests: one token per byte, followed by the control tokens.
#include <memory>

#include "ingot/text/chat/harmony_format.h"

namespace ingot::testing {

inline constexpr const char* kHarmonyNames[] = {"<|startoftext|>", "<|endoftext|>", "<|return|>",
                                                "<|constrain|>",   "<|channel|>",   "<|start|>",
                                                "<|end|>",         "<|message|>",   "<|call|>"};

inline std::shared_ptr<const ByteBpe> harmony_bytes() {
  ByteBpeRules rules{.pattern = WordPattern::o200k};
  for (int b = 0; b < 256; ++b) rules.tokens.push_back(std::string(1, char(b)));
  for (const char* name : kHarmonyNames) rules.specials.push_back({256 + int32_t(rules.specials.size()), name});
  return std::make_shared<ByteBpe>(std::move(rules));
}
inline const HarmonyFormat& harmony_format() {
  static const HarmonyFormat format(harmony_bytes(), "test");
  return format;
}

}  // namespace ingot::testing
