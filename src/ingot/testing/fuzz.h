#pragma once
// Shared by the fuzz targets: a file with the input as its content, without touching a disk.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "ingot/core/check.h"

// A property that must hold for every input; unlike assert, checked in every build.
#define FUZZ_REQUIRE(condition)                                                           \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (0)

namespace ingot::testing {

class MemoryFile {
 public:
  MemoryFile(const uint8_t* data, size_t size) : descriptor_(::memfd_create("fuzz", 0)) {
    if (descriptor_ < 0 || ::write(descriptor_, data, size) != ssize_t(size)) std::abort();
    path_ = "/proc/self/fd/" + std::to_string(descriptor_);
  }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  int descriptor_;
  std::string path_;
};

// Refusing an input is right; anything but an Error is a finding.
template <class Body> int refuse_or_accept(Body&& body) {
  try {
    body();
  } catch (const Error& e) { FUZZ_REQUIRE(e.what()[0] != '\0'); }
  return 0;
}

}  // namespace ingot::testing
