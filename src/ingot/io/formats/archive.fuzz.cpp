// The blobs of an accepted archive lie inside the file, one after the other, and all can be read. Each input is tried
// unchanged, and with corrected sizes and a corrected sum of its head, because no random change passes the check of the
// sum.
#include "ingot/io/formats/archive.h"

#include <cstring>

#include "ingot/io/formats/archive_sum.test.h"
#include "ingot/testing/fuzz.h"

namespace {

void open(const std::string& bytes) {
  const ingot::testing::MemoryFile input(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  ingot::testing::refuse_or_accept([&] {
    const ingot::ArchiveFile file(input.path());
    int64_t at = ingot::kArchiveAlign;
    unsigned sum = 0;
    for (const ingot::ArchiveEntry& e : file.entries()) {
      FUZZ_REQUIRE(e.offset >= at && e.bytes >= 0 && e.offset + e.bytes <= file.file_bytes());
      FUZZ_REQUIRE(file.find(e.name) == &e);
      for (int64_t i = 0; i < e.bytes; ++i) sum += static_cast<unsigned char>(file.data(e)[i]);
      at = e.offset + e.bytes;
    }
    FUZZ_REQUIRE(sum + 1 != 0 || at > 0);
    file.verify();
  });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  open(bytes);
  open(ingot::testing::with_right_sum(bytes));
  return 0;
}
