// The tensors of an accepted file lie inside the file, one after the other, each with the size that its shape and type
// give, and every key of its metadata can be read.
#include "ingot/io/formats/gguf.h"

#include "ingot/testing/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const ingot::testing::MemoryFile input(data, size);
  return ingot::testing::refuse_or_accept([&] {
    const ingot::GgufFile file(input.path());
    int64_t at = 0;
    std::vector<char> bytes;
    for (const ingot::SafetensorsEntry& e : file.entries()) {
      FUZZ_REQUIRE(e.begin >= at && e.begin < e.end && e.end <= int64_t(size));
      at = e.end;
      const ingot::GgufBlock block = ingot::gguf_block(e.dtype);
      int64_t numbers = 1;
      for (const int64_t n : e.shape) numbers *= n;
      FUZZ_REQUIRE(numbers / block.numbers * block.bytes == e.bytes() && e.shape.back() % block.numbers == 0);
      bytes.resize(size_t(e.bytes()));
      file.file().read_at(e.begin, bytes.data(), e.bytes());
    }
    // clang before version 16 cannot capture a part of a structured binding
    for (const auto& entry : file.metadata()) {
      FUZZ_REQUIRE(!entry.first.empty());
      ingot::testing::refuse_or_accept([&] { (void)file.number(entry.first); });
    }
    const ingot::GgufSet set(input.path());
    FUZZ_REQUIRE(set.files().size() == 1);
  });
}
