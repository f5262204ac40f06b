#pragma once
// A communicator over TCP with a connection between every two ranks. Sums are added in the order of ranks:
// x_0 + x_1 + ... + x_{world - 1}.
#include <memory>

#include "ingot/core/comm/communicator.h"
#include "ingot/core/comm/rendezvous.h"

namespace ingot {

class SocketCommunicator final : public Communicator {
 public:
  // Connects all ranks. A rank is lost when the waiting ranks receive no byte from this rank for `deadline` seconds.
  SocketCommunicator(const RankPlace& place, double deadline);
  ~SocketCommunicator() override;

  int rank() const override;
  int world() const override;
  // Tensors are in host memory; the stream is ignored.
  void all_reduce(const Tensor& x, Stream stream) override;
  void reduce_scatter(const Tensor& x, const Parts& parts, Stream stream) override;
  void all_gather(const Tensor& x, const Parts& parts, Stream stream) override;
  void broadcast(const Tensor& x, int root, Stream stream) override;
  void wait(Stream) override {}
  void gather_bytes(const void* mine, int64_t bytes, void* all) override;
  void broadcast_bytes(void* data, int64_t bytes, int root) override;
  void barrier(double seconds) override;

  double deadline() const;
  // Throws where a rank has ended; does not wait.
  void check_alive();
  // Throws a LostRank that names the ranks that do not enter this call within ten seconds, or where all enter it, a
  // LostRank with the message `what`. The connected ranks receive the reason first.
  [[noreturn]] void fail_by_roll_call(const std::string& what);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Partitions n numbers into `world` parts with sizes that differ by at most 1, the longer parts first.
Parts even_parts(int64_t n, int world);

}  // namespace ingot
