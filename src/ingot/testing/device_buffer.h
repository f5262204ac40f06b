#pragma once
// A tensor on a GPU with its mirror on the host. Both are poisoned (every float a NaN) and surrounded by guard bytes;
// after download() the host mirror shows the kernel's results and any write outside the buffer.
#include <cstring>

#include "ingot/gpu/device.h"
#include "ingot/testing/testing.h"

namespace ingot::testing {

class DeviceBuffer {
 public:
  // Rows `row_stride` elements apart, starting `shift` elements after an aligned address.
  DeviceBuffer(DType dtype, Shape shape, int64_t row_stride, int64_t shift = 0)
      : mirror_(size_t(2 * kGuard + (shape.rank == 0 ? 0 : rows_of(shape) * row_stride + shift) * size_of(dtype)),
                0xff),
        memory_(int64_t(mirror_.size())) {
    view_ = Tensor(nullptr, dtype, shape);
    int64_t step = row_stride;
    for (int i = shape.rank - 2; i >= 0; --i) {
      view_.stride[i] = step;
      step *= shape.dim[i];
    }
    start_ = kGuard + shift * size_of(dtype);
  }
  DeviceBuffer(DType dtype, Shape shape) : DeviceBuffer(dtype, shape, shape.rank == 0 ? 0 : shape[-1]) {}

  Tensor host() const { return at(const_cast<uint8_t*>(mirror_.data())); }
  Tensor tensor() const {
    Tensor t = at(static_cast<uint8_t*>(memory_.data()));
    t.device = Device{Device::cuda, 0};
    return t;
  }
  operator Tensor() const { return tensor(); }

  void upload() {
    sent_ = mirror_;
    gpu::copy_to_device(memory_.data(), mirror_.data(), memory_.bytes());
  }
  void download() {
    gpu::synchronize();
    gpu::copy_to_host(mirror_.data(), memory_.data(), memory_.bytes());
  }
  // After download(): nothing changed outside of the tensor's elements; with `elements_too`, nothing at all.
  bool untouched(bool elements_too = false) const {
    std::vector<uint8_t> now = mirror_;
    if (!elements_too) {
      const Tensor t = at(now.data()), before = at(const_cast<uint8_t*>(sent_.data()));
      copy(before, t);
    }
    return now == sent_;
  }

 private:
  static constexpr int64_t kGuard = 4096;  // at least 1024 elements of every floating type but f64
  static int64_t rows_of(const Shape& s) {
    int64_t n = 1;
    for (int i = 0; i + 1 < s.rank; ++i) n *= s.dim[i];
    return n;
  }
  Tensor at(uint8_t* base) const {
    Tensor t = view_;
    t.data = base + start_;
    return t;
  }

  std::vector<uint8_t> mirror_, sent_;
  gpu::DeviceMemory memory_;
  Tensor view_;
  int64_t start_ = 0;
};

}  // namespace ingot::testing
