#pragma once
// The contents of a tensor in host memory.
#include "ingot/core/memory/arena.h"

namespace ingot {

// On the CPU the tensor itself; otherwise a copy of its contents when the stream has reached the copy. Waits for the
// stream.
class HostCopy {
 public:
  HostCopy(const Tensor& t, Stream stream);
  const Tensor& tensor() const { return host_; }
  void write_back() const;  // copies back to the tensor; also waits

 private:
  Tensor there_, host_;
  Stream stream_;
  Arena memory_;
};

// A single f64.
double read_number(const Tensor& t, Stream stream);

}  // namespace ingot
