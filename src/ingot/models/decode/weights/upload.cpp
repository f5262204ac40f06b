#include "ingot/models/decode/weights/upload.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/gpu/allocator.h"

namespace ingot::decode {

#ifdef INGOT_HAS_CUDA_DECODE
namespace {
constexpr int kMostLanes = 16;         // more threads than any link needs
constexpr int64_t kSmall = 128 << 10;  // bytes below which threads do not pay
}  // namespace

Uploader::Uploader(int device) : device_(device) {
  const gpu::DeviceGuard guard(device_);
  const int lanes = std::min(thread_count(), kMostLanes);
  buffers_ = Arena(2 * lanes * kBufferBytes, gpu::pinned_memory());
  for (int i = 0; i < lanes; ++i) {
    lanes_.push_back(std::make_unique<Lane>());
    for (uint8_t*& buffer : lanes_.back()->buffer) buffer = buffers_.take(DType::u8, {kBufferBytes}).ptr<uint8_t>();
  }
}

void Uploader::copy(void* to, const void* from, int64_t bytes) {
  if (bytes <= kSmall) {
    const gpu::DeviceGuard guard(device_);
    return gpu::copy_to_device(to, from, bytes);
  }
  chunks((bytes + kBufferBytes - 1) / kBufferBytes, [&](int64_t i, uint8_t* buffer) {
    const int64_t at = i * kBufferBytes, n = std::min(kBufferBytes, bytes - at);
    std::memcpy(buffer, static_cast<const char*>(from) + at, size_t(n));
    return Chunk{static_cast<char*>(to) + at, n};
  });
}

void Uploader::chunks(int64_t count, const std::function<Chunk(int64_t, uint8_t*)>& make) {
  std::atomic<int64_t> next = 0;
  parallel_tasks(std::min(count, int64_t(lanes_.size())), [&](int64_t l) {
    const gpu::DeviceGuard guard(device_);
    const Lane& lane = *lanes_[size_t(l)];
    int turn = 0;
    for (int64_t i = next++; i < count; i = next++, turn ^= 1) {
      lane.stream[turn].synchronize();  // waits until the buffer has been sent
      const Chunk p = make(i, lane.buffer[turn]);
      gpu::copy_rows({.to = p.to, .from = lane.buffer[turn], .row_bytes = p.bytes, .device = device_},
                     lane.stream[turn]);
    }
    for (const gpu::OwnedStream& stream : lane.stream) stream.synchronize();
  });
}
#endif

}  // namespace ingot::decode
