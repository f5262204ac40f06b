#pragma once
// Collective operations among the processes of one run. A single process needs none; others implement the interface.
#include <memory>

#include "ingot/core/tensor.h"

namespace ingot {

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // In place, over all ranks. Floating tensors; the sum is taken in rank order, so every rank gets the same bits.
  virtual void all_reduce_sum(const Tensor& t, Stream stream) = 0;
  virtual void all_reduce_max(const Tensor& t, Stream stream) = 0;
  virtual void broadcast(const Tensor& t, int root, Stream stream) = 0;
  // Shards are equal slices of the first dimension: `whole` has size() times the rows of `part`.
  virtual void reduce_scatter_sum(const Tensor& whole, const Tensor& part, Stream stream) = 0;
  virtual void all_gather(const Tensor& part, const Tensor& whole, Stream stream) = 0;
  virtual void barrier() = 0;
};

// The communicator of a run with one process.
std::unique_ptr<Communicator> single_process();

}  // namespace ingot
