#pragma once
// What a tensor holds, in host memory.
#include "ingot/core/memory/arena.h"

namespace ingot {

// On the CPU the tensor itself; else a copy of it, as it is when the stream has come to it. Waits for the stream.
class HostCopy {
 public:
  HostCopy(const Tensor& t, Stream stream);
  const Tensor& tensor() const { return host_; }
  void write_back() const;  // to where it came from; waits too

 private:
  Tensor there_, host_;
  Stream stream_;
  Arena memory_;
};

// A single f64.
double read_number(const Tensor& t, Stream stream);

}  // namespace ingot
