#pragma once
// Makes archives with a changed head consistent again, because the code under test runs only after the check of the
// sum.
#include <algorithm>
#include <cstring>
#include <string>

#include "ingot/io/codecs/sha256.h"

namespace ingot::testing {

// Corrects the file's size, the place of the index and the sum, which is taken to be the last 64 bytes. The index
// begins at the place in the head, or else at the last multiple of 4096.
inline std::string with_right_sum(std::string bytes) {
  constexpr size_t kHead = 40, kSum = 64, kAlign = 4096;
  if (bytes.size() < kAlign + kSum) return bytes;
  const uint64_t size = bytes.size(), end = size - kSum;
  uint64_t offset;
  std::memcpy(&offset, bytes.data() + 24, 8);
  if (offset % kAlign != 0 || offset > end || offset < kAlign) offset = end / kAlign * kAlign;
  const uint64_t length = end - offset;
  std::memcpy(bytes.data() + 16, &size, 8);
  std::memcpy(bytes.data() + 24, &offset, 8);
  std::memcpy(bytes.data() + 32, &length, 8);
  Sha256 sum;
  sum.update(bytes.data(), int64_t(kHead));
  sum.update(bytes.data() + offset, int64_t(length));
  return bytes.replace(size_t(end), kSum, sum.hex());
}

}  // namespace ingot::testing
