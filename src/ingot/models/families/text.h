#pragma once
// What a model's files say of its text beside the tokenizer itself.
#include <cstdint>
#include <string>

namespace ingot {

// Of a directory, a GGUF file or an archive: the chat template, or empty where there is none. Of several named ones the
// default.
std::string chat_template_of(const std::string& path);
// Of a directory or a GGUF file: the token that begins every sequence, or -1.
int32_t start_token_of(const std::string& path);

}  // namespace ingot
