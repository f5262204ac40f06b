// The tensors of an accepted file fill the file exactly, and every tensor can be read.
#include "ingot/io/formats/safetensors.h"

#include "ingot/testing/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const ingot::testing::MemoryFile input(data, size);
  return ingot::testing::refuse_or_accept([&] {
    const ingot::SafetensorsFile file(input.path());
    int64_t at = file.header().data_begin;
    std::vector<char> bytes;
    for (const ingot::SafetensorsEntry& e : file.entries()) {
      FUZZ_REQUIRE(file.header().data_begin + e.begin == at);
      FUZZ_REQUIRE(file.find(e.name) == &e);
      at += e.bytes();
      bytes.resize(size_t(e.bytes()) + 1);
      file.read(e, bytes.data());
    }
    FUZZ_REQUIRE(at == int64_t(size));
  });
}
