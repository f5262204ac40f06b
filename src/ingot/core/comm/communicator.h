#pragma once
// What the ranks of a run tell each other. A rank is one process of a run; all of them make the same calls in the same
// order, with tensors of the same sizes. Every call has a deadline: a rank that went away, or that does not answer, is
// a LostRank that names it, never an endless wait.
#include <cstdint>
#include <string>
#include <vector>

#include "ingot/core/tensor.h"

namespace ingot {

// Another rank of the run ended, does not answer, or does something else than this one.
struct LostRank : Error {
  explicit LostRank(const std::string& message) : Error(ErrorCode::io, message) {}
};

// Part r of a tensor of one dimension is [begins[r], begins[r + 1]): world + 1 numbers. Parts may be empty.
using Parts = std::vector<int64_t>;

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int world() const = 0;

  // Contiguous tensors of one dimension, f32 or f64, in place and in the stream's order.
  virtual void all_reduce(const Tensor& x, Stream stream) = 0;  // the sum over ranks, the same bits on each
  // The sum over ranks of part r, on rank r; what the other parts hold afterwards is unspecified.
  virtual void reduce_scatter(const Tensor& x, const Parts& parts, Stream stream) = 0;
  virtual void all_gather(const Tensor& x, const Parts& parts, Stream stream) = 0;  // part r as rank r has it
  virtual void broadcast(const Tensor& x, int root, Stream stream) = 0;
  // Until the stream has come here.
  virtual void wait(Stream stream) = 0;

  // Host memory.
  virtual void gather_bytes(const void* mine, int64_t bytes, void* all) = 0;  // all: world times `bytes`, by rank
  virtual void broadcast_bytes(void* data, int64_t bytes, int root) = 0;
  virtual void barrier(double seconds) = 0;  // until all are here, at most so long
};

}  // namespace ingot
