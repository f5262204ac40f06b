#include "ingot/kernels/copy/host_copy.h"

#include "ingot/gpu/device.h"
#include "ingot/kernels/copy/copy.h"

namespace ingot {

HostCopy::HostCopy(const Tensor& t, Stream stream) : there_(t), host_(t), stream_(stream) {
  if (t.device.kind == Device::cpu) return;
  memory_ = Arena(t.bytes());
  host_ = memory_.take(t.dtype, t.shape);
  copy({.from = there_, .to = host_}, stream);
  gpu::synchronize(t.device, stream);
}

void HostCopy::write_back() const {
  if (there_.device.kind == Device::cpu) return;
  copy({.from = host_, .to = there_}, stream_);
  gpu::synchronize(there_.device, stream_);
}

double read_number(const Tensor& t, Stream stream) {
  const HostCopy here(t, stream);
  return *here.tensor().ptr<double>();
}

}  // namespace ingot
