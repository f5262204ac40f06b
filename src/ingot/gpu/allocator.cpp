#ifndef INGOT_EMULATED_DEVICE  // gpu/emulation/device.cpp
#include "ingot/gpu/allocator.h"

#include <array>

#include "ingot/core/check.h"
#include "ingot/gpu/device.h"

#ifdef INGOT_CUDA_BUILD
#include <cuda_runtime_api.h>
#endif

namespace ingot::gpu {
namespace {

constexpr int kMostDevices = 64;

#ifdef INGOT_CUDA_BUILD

class OnDevice final : public Allocator {
 public:
  Device device() const override { return {Device::cuda, index}; }
  void* take(int64_t bytes) override {
    const DeviceGuard guard(index);
    void* memory = nullptr;
    if (cudaMalloc(&memory, size_t(bytes)) == cudaErrorMemoryAllocation) {
      (void)cudaGetLastError();
      fail(ErrorCode::unsupported, "cuda:", index, " refused ", bytes, " bytes of memory, found ", available(),
           " free");
    }
    check_cuda(cudaGetLastError(), "allocating ", bytes, " bytes on cuda:", index);
    return memory;
  }
  void give_back(void* memory, int64_t) noexcept override { (void)cudaFree(memory); }
  int64_t available() const override {
    const DeviceGuard guard(index);
    size_t free = 0, total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "free memory of cuda:", index);
    return int64_t(free);
  }
  int index = 0;
};

class Pinned final : public Allocator {
 public:
  Device device() const override { return {}; }
  void* take(int64_t bytes) override {
    void* memory = nullptr;
    check_cuda(cudaMallocHost(&memory, size_t(bytes)), "allocating ", bytes, " bytes of pinned host memory");
    return memory;
  }
  void give_back(void* memory, int64_t) noexcept override { (void)cudaFreeHost(memory); }
};

#else

class OnDevice final : public Allocator {
 public:
  Device device() const override { return {Device::cuda, index}; }
  void* take(int64_t bytes) override {
    fail(ErrorCode::unsupported, "arena: found a request for ", bytes, " bytes on ", device(),
         ", but Ingot was built without CUDA; expected cpu");
  }
  void give_back(void*, int64_t) noexcept override {}
  int index = 0;
};

#endif

}  // namespace

Allocator& device_memory(int index) {
  INGOT_CHECK(index >= 0 && index < kMostDevices, "device memory: found cuda:", index,
              ", expected cuda:0 to cuda:", kMostDevices - 1);
  static auto devices = [] {
    std::array<OnDevice, kMostDevices> all;
    for (int i = 0; i < kMostDevices; ++i) all[size_t(i)].index = i;
    return all;
  }();
  return devices[size_t(index)];
}

Allocator& memory_of(Device device) {
  return device.kind == Device::cpu ? system_memory() : device_memory(device.index);
}

Allocator& pinned_memory() {
#ifdef INGOT_CUDA_BUILD
  static Pinned pinned;
  if (device_count() > 0) return pinned;
#endif
  return system_memory();
}

}  // namespace ingot::gpu
#endif
