#pragma once
// A plain array on a GPU with its host copy, for tests of the device layer. Elements start as 0xff bytes.
#include <cstdint>
#include <cstring>
#include <numeric>
#include <vector>

#include "ingot/gpu/device.h"

namespace ingot::testing {

template <class T> class DeviceArray {
 public:
  explicit DeviceArray(size_t n) : host(n), memory_(int64_t(n * sizeof(T))) {
    std::memset(static_cast<void*>(host.data()), 0xff, n * sizeof(T));
    upload();
  }
  DeviceArray(std::vector<T> values) : host(std::move(values)), memory_(int64_t(host.size() * sizeof(T))) { upload(); }

  T* device() const { return static_cast<T*>(memory_.data()); }
  void upload() { gpu::copy_to_device(memory_.data(), host.data(), memory_.bytes()); }
  void download() {
    gpu::synchronize();
    gpu::copy_to_host(host.data(), memory_.data(), memory_.bytes());
  }

  std::vector<T> host;

 private:
  gpu::DeviceMemory memory_;
};

// from, from + 1, ...
inline std::vector<uint32_t> counting(size_t n, uint32_t from = 1) {
  std::vector<uint32_t> v(n);
  std::iota(v.begin(), v.end(), from);
  return v;
}

}  // namespace ingot::testing
