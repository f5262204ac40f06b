#pragma once
// Uploads weights to a GPU: all threads fill pinned buffers in parallel, and the link reads the buffers at full speed.
// An ordinary copy from pageable memory would use a single thread.
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "ingot/core/memory/arena.h"
#include "ingot/gpu/device.h"

namespace ingot::decode {

class Uploader {
 public:
  static constexpr int64_t kBufferBytes = int64_t(1) << 20;  // bytes of a buffer

  explicit Uploader(int device);
  // All data has arrived on the GPU when these functions return.
  void copy(void* to, const void* from, int64_t bytes);
  // make(i, buffer) writes chunk i into the buffer, and returns its destination and its number of bytes.
  struct Chunk {
    void* to;
    int64_t bytes;
  };
  void chunks(int64_t count, const std::function<Chunk(int64_t, uint8_t*)>& make);

 private:
  // The two pinned buffers of a thread, each with the stream that copies the buffer to the GPU: the thread fills one
  // buffer while the copy engine reads the other one.
  struct Lane {
    uint8_t* buffer[2];
    gpu::OwnedStream stream[2];
  };
  int device_;
  Arena buffers_;
  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace ingot::decode
