#pragma once
// GPUs for host code: their number, properties, and owners of memory, streams, events and graphs. Operations never
// allocate; these owners serve tests, benchmarks and programs. Without CUDA in the build, device_count() is 0,
// current_device() is -1, and all further functions fail with an error.
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "ingot/core/tensor.h"

namespace ingot::gpu {

int device_count();    // 0 without a driver, a GPU or CUDA in the build; never throws
int current_device();  // of this thread; -1 without CUDA in the build

struct DeviceInfo {
  std::string name;
  int sms = 0, major = 0, minor = 0;
  int64_t l2_bytes = 0, memory_bytes = 0;
  int driver = 0, runtime = 0;  // as CUDA writes versions: 13000 is 13.0
};
DeviceInfo device_info(int device = 0);
// Whether kernels on `device` can read and write the memory of `peer`. enable_peer_access() turns this access on.
bool can_access_peer(int device, int peer);
void enable_peer_access(int device, int peer);
// The number of multiprocessors, at most that of the GPU which INGOT_GPU_AS names. The function asks the runtime in
// each call; the runtime keeps the answer, so this is fast.
int sm_count(int device);
// The memory's peak rate in bytes per second: 3.35e12 for an H100, 4.9e12 for an H200. Cached after the first call,
// because the driver takes a millisecond to answer.
double memory_bandwidth(int device);

// Throws Error(unsupported) unless status is cudaSuccess: the note, the error's name and text.
void check_cuda_status(int status, const std::string& note);
template <class Status, class... Note> void check_cuda(Status status, const Note&... note) {
  if (int(status) != 0) [[unlikely]]
    check_cuda_status(int(status), ingot::detail::concat(note...));
}

// Makes `device` current and restores the previous device.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;  // -1: nothing to restore
};

// Allows a kernel's blocks this much dynamic shared memory on `device`, the current device. Every block may have 48 KB
// without a call, including the kernel's static shared memory.
void allow_smem(const char* name, const void* kernel, int device, int64_t bytes);

class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(int64_t bytes);
  DeviceMemory(DeviceMemory&& o) noexcept
      : data_(std::exchange(o.data_, nullptr)), bytes_(std::exchange(o.bytes_, 0)) {}
  DeviceMemory& operator=(DeviceMemory&& o) noexcept {
    std::swap(data_, o.data_);
    std::swap(bytes_, o.bytes_);
    return *this;
  }
  ~DeviceMemory();
  void* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

class OwnedStream {
 public:
  OwnedStream();
  ~OwnedStream();
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  operator Stream() const { return {handle_}; }
  void synchronize() const;

 private:
  void* handle_ = nullptr;
};

class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(Stream stream);
  void synchronize();
  double seconds_since(const Event& start) const;

 private:
  void* handle_ = nullptr;
};

// The launches `work` makes on `stream`, recorded once and replayed.
class Graph {
 public:
  Graph(Stream stream, const std::function<void()>& work);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(Stream stream) const;

 private:
  void* handle_ = nullptr;
};

// Copies of raw bytes. A copy without a stream is complete when the call returns and can be read from any stream; it
// waits only for earlier work of the default stream. A copy with a stream from ordinary host memory returns when the
// source may be reused; a copy from pinned memory (allocator.h) returns at once, while the engine still reads the
// source.
void copy_to_device(void* to, const void* from, int64_t bytes);
void copy_to_host(void* to, const void* from, int64_t bytes);
void copy_on_device(void* to, const void* from, int64_t bytes, Stream stream);
void fill_bytes(void* to, uint8_t value, int64_t bytes, Stream stream);
// Rows of equal length, copied from host memory to cuda:device or back, in stream order.
struct RowCopy {
  void* to = nullptr;
  const void* from = nullptr;
  int64_t to_step = 0, from_step = 0;  // bytes from row to row
  int64_t rows = 1, row_bytes = 0;
  int device = 0;
};
void copy_rows(const RowCopy& c, Stream stream);
void synchronize();
// Waits for all work of the stream; on the CPU all work is done when its call returns.
void synchronize(Device device, Stream stream);

}  // namespace ingot::gpu
