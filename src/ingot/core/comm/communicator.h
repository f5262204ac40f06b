#pragma once
// Collective communication between the ranks of a run. A rank is one process of the run. All ranks make the same calls
// in the same order, with tensors of the same sizes. Every call has a deadline: where a rank has ended or does not
// answer, the call throws a LostRank with the rank's number, and never waits without end.
#include <cstdint>
#include <string>
#include <vector>

#include "ingot/core/tensor.h"

namespace ingot {

// Another rank of the run ended, does not answer, or made a different call than this rank.
struct LostRank : Error {
  explicit LostRank(const std::string& message) : Error(ErrorCode::io, message) {}
};

// A partition of a one-dimensional tensor: part r is [begins[r], begins[r + 1]). `begins` has world + 1 numbers; parts
// may be empty.
using Parts = std::vector<int64_t>;

class Communicator {
 public:
  virtual ~Communicator() = default;
  virtual int rank() const = 0;
  virtual int world() const = 0;

  // The collectives take contiguous one-dimensional tensors, f32 or f64, change the tensors in place and run in stream
  // order.
  virtual void all_reduce(const Tensor& x,
                          Stream stream) = 0;  // the sum over all ranks, with the same bits on every rank
  // Leaves the sum over ranks of part r on rank r. The contents of all further parts are unspecified afterwards.
  virtual void reduce_scatter(const Tensor& x, const Parts& parts, Stream stream) = 0;
  virtual void all_gather(const Tensor& x, const Parts& parts,
                          Stream stream) = 0;  // copies part r of rank r to all ranks
  virtual void broadcast(const Tensor& x, int root, Stream stream) = 0;
  // Waits until the collectives issued on the stream are complete.
  virtual void wait(Stream stream) = 0;

  // The two calls below work on host memory.
  virtual void gather_bytes(const void* mine, int64_t bytes,
                            void* all) = 0;  // `all` receives world blocks of `bytes`, ordered by rank
  virtual void broadcast_bytes(void* data, int64_t bytes, int root) = 0;
  virtual void barrier(double seconds) = 0;  // waits for all ranks, at most `seconds`
};

}  // namespace ingot
