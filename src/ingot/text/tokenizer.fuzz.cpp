// A file that is accepted as a tokenizer converts text to ids of its vocabulary, and ids of its vocabulary to text.
#include "ingot/text/tokenizer.h"

#include "ingot/testing/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const ingot::testing::MemoryFile input(data, size);
  return ingot::testing::refuse_or_accept([&] {
    const std::unique_ptr<ingot::Tokenizer> tokenizer = ingot::load_tokenizer(input.path());
    FUZZ_REQUIRE(tokenizer->vocab_size() > 0);
    FUZZ_REQUIRE(tokenizer->bos() >= -1 && tokenizer->bos() < tokenizer->vocab_size());
    FUZZ_REQUIRE(tokenizer->hash() != 0);
    for (int32_t id = 0; id < tokenizer->vocab_size() && id < 1000; ++id) {
      FUZZ_REQUIRE(tokenizer->bytes(id / 2, id) >= 0);
      tokenizer->decode(std::span<const int32_t>(&id, 1));
    }
    for (const char* text :
         {"Hello,  world!\n\tint x_1 = 42;", "na\u00efve \u20ac5 \U0001F600 \u4f60\u597d", "aaaaaaaaaaaaaaaa"}) {
      const std::vector<int32_t> ids = tokenizer->encode(text);
      for (const int32_t id : ids) FUZZ_REQUIRE(id >= 0 && id < tokenizer->vocab_size());
      if (tokenizer->kind() == "byte_bpe") FUZZ_REQUIRE(tokenizer->decode(ids) == text);
    }
  });
}
