#pragma once
// Memory planned before it is used: buffers with known lifetimes share one block, and nothing is allocated afterwards.
#include <cstdint>
#include <vector>

#include "ingot/core/memory/allocator.h"
#include "ingot/core/tensor.h"

namespace ingot {

// Assigns offsets to buffers that are alive over closed intervals of steps, so that buffers alive together never
// overlap.
class ArenaPlan {
 public:
  // Returns the buffer's number. It is alive from step `first` to step `last`, both included.
  int add(int64_t bytes, int first, int last);
  // Largest first, each at the lowest offset that is free for its whole life.
  void solve();
  int64_t offset(int buffer) const { return buffers_[size_t(buffer)].offset; }
  int64_t total_bytes() const { return total_; }
  int64_t sum_of_sizes() const;  // what the buffers would take without sharing

 private:
  struct Buffer {
    int64_t bytes, offset;
    int first, last;
  };
  std::vector<Buffer> buffers_;
  int64_t total_ = 0;
};

// An aligned block of memory of one device, bounded at construction. What it holds at first is the allocator's affair:
// whoever needs zeros writes them.
class Arena {
 public:
  Arena() = default;
  explicit Arena(int64_t bytes, Allocator& allocator = system_memory());
  Arena(Arena&& other) noexcept;
  Arena& operator=(Arena&& other) noexcept;
  ~Arena();
  Tensor at(int64_t offset, DType dtype, Shape shape) const;  // on the arena's device; checks the bound
  // Takes the next bytes of the block: aligned(...) of them.
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
