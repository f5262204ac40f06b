#pragma once
// Communication between ranks with a GPU each, by NVIDIA's NCCL. The library is opened at run time, so neither its
// header nor the library are needed for a build. Where INGOT_NCCL is set, only this path is tried. Otherwise the search
// takes the loader's libraries, then Python's packages (nvidia-nccl-cu13, installed with PyTorch). NVLink multicast is
// off unless NCCL_NVLS_ENABLE turns multicast on, because on a shared machine multicast can put GPUs out of service.
#include <memory>
#include <string>

#include "ingot/core/comm/socket_communicator.h"

namespace ingot::gpu {

// The library's version as "2.28.9", or a line with the reason why Ingot does not use the library, and with the package
// to install.
std::string nccl_version();
bool nccl_available();

// `control` carries the messages through host memory and the news of a lost rank; `control` must outlive this object.
// NCCL chooses the order of sums: the same in every run on the same machine, with the same bits on every rank.
class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(SocketCommunicator& control, int device);
  ~NcclCommunicator() override;

  int rank() const override { return control_.rank(); }
  int world() const override { return control_.world(); }
  // Operations on the device's memory. These functions return when the work is queued on the stream.
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
