#pragma once
// Weights in host memory as a model on another device reads them.
#include "ingot/core/arena.h"
#include "ingot/gpu/allocator.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/models/gpt/call.h"

namespace ingot {

// On the CPU the given tensor itself; on a GPU copies of it, in the products' type too.
class DeviceWeights {
 public:
  DeviceWeights(const Tensor& flat, Device device, Stream stream) : weights_(flat) {
    if (device.kind == Device::cpu) return;
    const GptTypes types = gpt_types(device);
    memory_ = Arena(Arena::aligned(types.master, flat.shape) + Arena::aligned(types.compute, flat.shape),
                    gpu::memory_of(device));
    weights_ = GptWeights(memory_.take(types.master, flat.shape), memory_.take(types.compute, flat.shape));
    copy({.from = flat, .to = weights_.master}, stream);
    copy({.from = weights_.master, .to = weights_.compute}, stream);
  }
  const GptWeights& weights() const { return weights_; }

 private:
  Arena memory_;
  GptWeights weights_;
};

}  // namespace ingot
