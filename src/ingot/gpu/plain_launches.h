#pragma once
// The kernels of a CUDA graph, launched one by one: a measurement of what graphs and programmatic launches save.
#include <functional>

#include "ingot/core/tensor.h"

namespace ingot::gpu {

class PlainLaunches {
 public:
  // Records `work`, which must launch kernels alone, in one order, on the stream. Error{unsupported} for other work.
  PlainLaunches(Stream stream, const std::function<void()>& work);
  ~PlainLaunches();
  PlainLaunches(const PlainLaunches&) = delete;
  PlainLaunches& operator=(const PlainLaunches&) = delete;
  // Launches the kernels in their order, each with the recorded arguments. Each kernel starts only after the preceding
  // kernel has ended, even if the recorded launch allows an earlier start (Launch::overlap).
  void launch(Stream stream) const;
  int64_t count() const;  // of kernels

 private:
  struct Kernels;
  Kernels* kernels_;
};

}  // namespace ingot::gpu
