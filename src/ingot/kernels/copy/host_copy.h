#pragma once
// The contents of a tensor in host memory.
#include "ingot/core/memory/arena.h"

namespace ingot {

// On the CPU this is the tensor itself. Otherwise this is a copy of the contents that the tensor has after the stream's
// earlier work; the constructor waits for the copy.
class HostCopy {
 public:
  HostCopy(const Tensor& t, Stream stream);
  const Tensor& tensor() const { return host_; }
  void write_back() const;  // copies the contents back to the tensor, and waits for the copy

 private:
  Tensor there_, host_;
  Stream stream_;
  Arena memory_;
};

// Reads a tensor of a single f64.
double read_number(const Tensor& t, Stream stream);

}  // namespace ingot
