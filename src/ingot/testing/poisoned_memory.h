#pragma once
// An allocator whose memory starts as NaN in every floating type, for tests of code that must write before reading.
#include <cstring>

#include "ingot/core/memory/allocator.h"
#include "ingot/gpu/device.h"

namespace ingot::testing {

class PoisonedMemory final : public Allocator {
 public:
  explicit PoisonedMemory(Allocator& from = system_memory()) : from_(from) {}
  Device device() const override { return from_.device(); }
  void* take(int64_t bytes) override {
    void* memory = from_.take(bytes);
    if (device().kind == Device::cpu) {
      std::memset(memory, 0xff, size_t(bytes));
    } else {
      gpu::fill_bytes(memory, 0xff, bytes, {});
      gpu::synchronize();
    }
    taken_ += bytes;
    return memory;
  }
  void give_back(void* memory, int64_t bytes) noexcept override {
    taken_ -= bytes;
    from_.give_back(memory, bytes);
  }
  int64_t available() const override { return from_.available(); }
  int64_t taken() const { return taken_; }  // and not yet given back

 private:
  Allocator& from_;
  int64_t taken_ = 0;
};

}  // namespace ingot::testing
