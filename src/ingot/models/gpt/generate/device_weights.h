#pragma once
// Weights and adapters in host memory, for a model on another device.
#include "ingot/core/memory/arena.h"
#include "ingot/gpu/allocator.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/models/gpt/adapters/adapters.h"
#include "ingot/models/gpt/call.h"
#include "ingot/models/gpt/config/parameters.h"

namespace ingot {

// On the CPU the given tensor itself; on a GPU copies of the tensor, including a copy in the products' type.
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

// A document's adapters (numbers) f32: on the CPU the given tensor itself; on a GPU a copy in the products' type.
class DeviceAdapters {
 public:
  DeviceAdapters(const AdapterLayout& layout, const Tensor& flat, Device device, Stream stream) {
    const Shape one{1, flat.numel()};
    if (device.kind == Device::cpu) {
      views_ = layout.views(flat.reshape(one));
      return;
    }
    const GptTypes types = gpt_types(device);
    memory_ = Arena(Arena::aligned(flat.dtype, one) + Arena::aligned(types.compute, one), gpu::memory_of(device));
    const Tensor same = memory_.take(flat.dtype, one), narrow = memory_.take(types.compute, one);
    copy({.from = flat.reshape(one), .to = same}, stream);
    copy({.from = same, .to = narrow}, stream);
    views_ = layout.views(narrow);
  }
  const GptAdapters& views() const { return views_; }

 private:
  Arena memory_;
  GptAdapters views_;
};

// Frozen weights. With grouped queries, the matrix of the queries lies in a different bank than those of keys and
// values. A GPU multiplies by all three matrices at once and therefore gets adjacent copies.
class FrozenWeights {
 public:
  FrozenWeights(const GptConfig& config, const GptWeights& weights, Stream stream) : weights_(weights) {
    const Device device = weights.master.device;
    if (device.kind == Device::cpu || config.heads == config.kv_heads) return;
    const ParameterLayout layout(config);
    const Tensor& flat = weights.compute ? weights.compute : weights.master;
    const Shape all{config.layers, (config.heads + 2 * config.kv_heads) * config.head_dim, config.dim};
    memory_ = Arena(Arena::aligned(flat.dtype, all), gpu::memory_of(device));
    weights_.qkv = memory_.take(flat.dtype, all);
    for (int64_t i = 0; i < config.layers; ++i) {
      int64_t row = 0;
      for (const char* name : {"q", "k", "v"}) {
        const Tensor w = layout.view(flat, layout.find(detail::concat("blocks.", i, ".attn.", name, ".weight")));
        copy({.from = w, .to = weights_.qkv.row(i).slice(0, row, row + w.rows())}, stream);
        row += w.rows();
      }
    }
  }
  const GptWeights& weights() const { return weights_; }

 private:
  Arena memory_;
  GptWeights weights_;
};

}  // namespace ingot
