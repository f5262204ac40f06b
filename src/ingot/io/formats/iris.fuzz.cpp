// The tensors of an accepted file lie inside the file, without overlaps, and have the sizes that their shapes give.
#include "ingot/io/formats/iris.h"

#include "ingot/testing/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const ingot::testing::MemoryFile input(data, size);
  return ingot::testing::refuse_or_accept([&] {
    const ingot::IrisFile file(input.path());
    int64_t at = 0;
    std::vector<char> bytes;
    for (const ingot::SafetensorsEntry& e : file.entries()) {
      FUZZ_REQUIRE(e.begin >= at && e.begin <= e.end && e.end <= int64_t(size));
      at = e.end;
      bytes.resize(size_t(e.bytes()));
      file.file().read_at(e.begin, bytes.data(), e.bytes());
    }
    FUZZ_REQUIRE(file.entries().empty() || at == int64_t(size));
  });
}
