#pragma once
// A tokenizer for tests: one token per byte, and bos = 256.
#include "ingot/text/tokenizer.h"

namespace ingot::testing {

class ByteTokenizer : public Tokenizer {
 public:
  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    for (const char c : text) ids.push_back(int32_t(static_cast<unsigned char>(c)));
    return ids;
  }
  std::string decode(std::span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids)
      if (id < 256) text += char(id);
    return text;
  }
  int64_t bytes(int32_t, int32_t id) const override { return id < 256 ? 1 : 0; }
  int32_t bos() const override { return 256; }
  int vocab_size() const override { return 257; }
  uint32_t hash() const override { return 77; }
  std::string token_bytes(int32_t id) const override { return id < 256 ? std::string(1, char(id)) : "<bos>"; }
  std::string kind() const override { return "bytes"; }
};

}  // namespace ingot::testing
