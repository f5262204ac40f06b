#pragma once
// Archives whose head was changed, made consistent again: what a test wants to reach lies behind the sum.
#include <algorithm>
#include <cstring>
#include <string>

#include "ingot/io/codecs/sha256.h"

namespace ingot::testing {

// The file's size, the index's place and the sum put right, the last 64 bytes taken for the sum. The index begins where
// the head says, or else at the last multiple of 4096.
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
