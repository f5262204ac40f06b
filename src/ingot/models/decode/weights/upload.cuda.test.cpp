#ifdef INGOT_HAS_CUDA_DECODE
#include "ingot/models/decode/weights/upload.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "ingot/core/check.h"
#include "ingot/testing/gpu_test.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot::decode {
namespace {

using UploaderCuda = testing::GpuTest<>;

std::vector<uint8_t> bytes_of(int64_t n) {
  std::vector<uint8_t> bytes(static_cast<size_t>(n));
  uint32_t state = 1;
  for (uint8_t& b : bytes) state = state * 1664525u + 1013904223u, b = uint8_t(state >> 24);
  return bytes;
}
std::vector<uint8_t> download(const gpu::DeviceMemory& m) {
  std::vector<uint8_t> bytes(static_cast<size_t>(m.bytes()));
  gpu::copy_to_host(bytes.data(), m.data(), m.bytes());
  return bytes;
}

TEST_F(UploaderCuda, EveryByteArrives) {
  Uploader uploader(0);
  for (const int64_t n : {int64_t(1), int64_t(128) << 10, (int64_t(128) << 10) + 1, Uploader::kBufferBytes,
                          9 * Uploader::kBufferBytes - 3, 40 * Uploader::kBufferBytes + 5}) {
    const std::vector<uint8_t> want = bytes_of(n);
    const gpu::DeviceMemory to(n);
    uploader.copy(to.data(), want.data(), n);
    EXPECT_TRUE(download(to) == want) << n << " bytes";
  }
}

TEST_F(UploaderCuda, ChunksArriveAtTheirDestinationsAndAnErrorIsThrown) {
  Uploader uploader(0);
  const gpu::DeviceMemory to(1000);
  const auto fill = [&](int64_t i, uint8_t* buffer) {
    std::memset(buffer, int(i), 10);
    return Uploader::Chunk{static_cast<uint8_t*>(to.data()) + 10 * (99 - i), 10};
  };
  const auto fails = [&](int64_t i, uint8_t* buffer) {
    if (i == 7) fail(ErrorCode::io, "found no chunk 7, expected it");
    return fill(i, buffer);
  };
  EXPECT_NE(testing::error_of([&] { uploader.chunks(100, fails); }).find("no chunk 7"), std::string::npos);
  uploader.chunks(100, fill);
  const std::vector<uint8_t> found = download(to);
  for (size_t i = 0; i < found.size(); ++i) ASSERT_EQ(found[i], 99 - i / 10) << i;
  uploader.chunks(0, fill);
}

}  // namespace
}  // namespace ingot::decode
#endif
