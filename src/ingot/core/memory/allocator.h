#pragma once
// Where an Arena's memory comes from. core knows the system's; gpu/allocator.h has those of devices.
#include <cstdint>

#include "ingot/core/tensor.h"

namespace ingot {

class Allocator {
 public:
  virtual ~Allocator() = default;
  virtual Device device() const = 0;  // on which what it gives may be read and written
  // At least `bytes` > 0, aligned to 64 bytes or more; zeros where gives_zeros() says so, else anything. Throws Error,
  // naming what was asked for.
  virtual void* take(int64_t bytes) = 0;
  virtual void give_back(void* memory, int64_t bytes) noexcept = 0;
  virtual bool gives_zeros() const { return false; }
  virtual int64_t available() const { return -1; }  // bytes it could still give; -1: unknown
};

// The system's memory: addresses at once, pages (of zeros) when first touched.
Allocator& system_memory();

}  // namespace ingot
