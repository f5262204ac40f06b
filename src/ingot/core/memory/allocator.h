#pragma once
// The source of an Arena's memory. This header has the system's allocator; gpu/allocator.h has the allocators of
// devices.
#include <cstdint>

#include "ingot/core/tensor.h"

namespace ingot {

class Allocator {
 public:
  virtual ~Allocator() = default;
  virtual Device device() const = 0;  // the device with access to the memory
  // Allocates at least `bytes` > 0, aligned to 64 bytes or more. The memory is zero where gives_zeros() is true, and
  // uninitialised otherwise. Throws an Error with the requested size.
  virtual void* take(int64_t bytes) = 0;
  virtual void give_back(void* memory, int64_t bytes) noexcept = 0;
  virtual bool gives_zeros() const { return false; }
  virtual int64_t available() const { return -1; }  // bytes still free; -1 where unknown
};

// The system's memory: addresses are reserved at once, and zeroed pages are mapped when first touched.
Allocator& system_memory();

}  // namespace ingot
