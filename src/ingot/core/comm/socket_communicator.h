#pragma once
// Ranks that talk over TCP, each with each. Sums are added in the order of ranks: x_0 + x_1 + ... + x_{world - 1}.
#include <memory>

#include "ingot/core/comm/communicator.h"
#include "ingot/core/comm/rendezvous.h"

namespace ingot {

class SocketCommunicator final : public Communicator {
 public:
  // Connects all ranks. `deadline` seconds without a byte from a rank that is waited for are its end.
  SocketCommunicator(const RankPlace& place, double deadline);
  ~SocketCommunicator() override;

  int rank() const override;
  int world() const override;
  // Of host memory; the stream is not looked at.
  void all_reduce(const Tensor& x, Stream stream) override;
  void reduce_scatter(const Tensor& x, const Parts& parts, Stream stream) override;
  void all_gather(const Tensor& x, const Parts& parts, Stream stream) override;
  void broadcast(const Tensor& x, int root, Stream stream) override;
  void wait(Stream) override {}
  void gather_bytes(const void* mine, int64_t bytes, void* all) override;
  void broadcast_bytes(void* data, int64_t bytes, int root) override;
  void barrier(double seconds) override;

  double deadline() const;
  // Throws where a rank has gone; waits for nothing.
  void check_alive();
  // Throws LostRank, naming those who are not in this call within a few seconds, after all the others were told.
  [[noreturn]] void fail_by_roll_call(const std::string& what);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// n numbers cut into `world` parts, the first ones longer by one where they do not divide.
Parts even_parts(int64_t n, int world);

}  // namespace ingot
