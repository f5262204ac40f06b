#pragma once
// Shared code of the readers of GPT-OSS's configuration (config.h).
#include <string>

#include "ingot/core/check.h"
#include "ingot/models/gpt_oss/config.h"

namespace ingot::detail {

constexpr double kOriginalContext = 4096;
// The rotary scaling of the architecture, for configs without one; OpenAI's own config may omit single fields of it.
inline const RopeScaling kDefaultScaling = {
    .kind = RopeScaling::yarn, .factor = 32, .original_context = kOriginalContext, .truncate = false};

template <class T> void in_range(const std::string& where, const char* field, T value, T low, T high) {
  if (!(value >= low && value <= high))
    fail(ErrorCode::bad_data, where, ": ", field, ": found ", value, ", expected ", low, " to ", high);
}

// Of the metadata of a GGUF file, and the sizes of its tensors.
GptOssConfig gpt_oss_config_from_gguf(const std::string& path);

}  // namespace ingot::detail
