#pragma once
// Memory planned before use: buffers with known lifetimes share a block, and no allocation follows.
#include <cstdint>
#include <vector>

#include "ingot/core/memory/allocator.h"
#include "ingot/core/tensor.h"

namespace ingot {

// Assigns offsets to buffers with lifetimes of closed intervals of steps, so that buffers alive together never overlap.
class ArenaPlan {
 public:
  // Adds a buffer alive from step `first` to step `last`, both included. Returns the number of the buffer.
  int add(int64_t bytes, int first, int last);
  // Places the largest buffers first, each at the lowest free offset during the buffer's whole lifetime.
  void solve();
  int64_t offset(int buffer) const { return buffers_[size_t(buffer)].offset; }
  int64_t total_bytes() const { return total_; }
  int64_t sum_of_sizes() const;  // the bytes of all buffers without sharing

 private:
  struct Buffer {
    int64_t bytes, offset;
    int first, last;
  };
  std::vector<Buffer> buffers_;
  int64_t total_ = 0;
};

// An aligned block of a device's memory, of a size fixed at construction. The initial contents depend on the allocator;
// callers must not expect zeros.
class Arena {
 public:
  Arena() = default;
  explicit Arena(int64_t bytes, Allocator& allocator = system_memory());
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  ~Arena();
  Tensor at(int64_t offset, DType dtype, Shape shape) const;  // on the arena's device; checks the bound
  // Returns the next part of the block, of aligned(...) bytes.
  Tensor take(DType dtype, Shape shape);
  static constexpr int64_t kAlign = 64;
  static constexpr int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
  static int64_t aligned(DType dtype, const Shape& shape) { return aligned(shape.numel() * size_of(dtype)); }
  int64_t capacity() const { return capacity_; }
  int64_t used() const { return used_; }
  Device device() const { return device_; }

 private:
  Allocator* allocator_ = nullptr;
  Device device_;
  void* memory_ = nullptr;
  int64_t capacity_ = 0, used_ = 0;
};

}  // namespace ingot
