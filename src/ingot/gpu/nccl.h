#pragma once
// Ranks with a GPU each, over NVIDIA's NCCL, which is opened at run time: neither its header nor the library are needed
// to build. It is looked for where INGOT_NCCL says (a path), by the loader, and among the packages of Python
// (nvidia-nccl-cu13, which PyTorch brings). NVLink multicast is off unless NCCL_NVLS_ENABLE says otherwise: on a
// machine that is shared it can put GPUs out of service.
#include <memory>
#include <string>

#include "ingot/core/comm/socket_communicator.h"

namespace ingot::gpu {

// Its version as "2.28.9", or in one line why it is not used and what to install.
std::string nccl_version();
bool nccl_available();

// What goes through host memory goes over `control`, which must outlive it, and so does the news of a rank that is
// lost. The order of sums is NCCL's own: the same in every run on the same machine, and the same bits on every rank.
class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(SocketCommunicator& control, int device);
  ~NcclCommunicator() override;

  int rank() const override { return control_.rank(); }
  int world() const override { return control_.world(); }
  // Of the device's memory; they return when the work is in the stream.
  void all_reduce(const Tensor& x, Stream stream) override;
  void reduce_scatter(const Tensor& x, const Parts& parts, Stream stream) override;
  void all_gather(const Tensor& x, const Parts& parts, Stream stream) override;
  void broadcast(const Tensor& x, int root, Stream stream) override;
  void wait(Stream stream) override;
  void gather_bytes(const void* mine, int64_t bytes, void* all) override { control_.gather_bytes(mine, bytes, all); }
  void broadcast_bytes(void* data, int64_t bytes, int root) override { control_.broadcast_bytes(data, bytes, root); }
  void barrier(double seconds) override { control_.barrier(seconds); }

 private:
  struct Impl;
  SocketCommunicator& control_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ingot::gpu
