#pragma once
// Information about text in a model's files beside the tokenizer itself.
#include <cstdint>
#include <string>

namespace ingot {

// The chat template of a directory, a GGUF file or an archive; empty if there is none. If there are several named
// templates, the default one.
std::string chat_template_of(const std::string& path);
// The first token of every sequence, or -1. For a directory (its tokenizer_in()), a tokenizer.json, a SentencePiece
// .model or a GGUF file.
int32_t start_token_of(const std::string& path);

}  // namespace ingot
