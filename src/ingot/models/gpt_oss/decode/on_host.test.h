#pragma once
// A model's weights, brought back from a GPU.
#include <algorithm>
#include <vector>

#include "ingot/gpu/device.h"
#include "ingot/kernels/quant/granules.h"
#include "ingot/models/gpt_oss/decode/device_model.h"

namespace ingot::testing {

// Copies a synthetic model's weights back, for the CPU engine and for models over several GPUs.
struct OnHost {
  std::vector<std::vector<uint8_t>> memory;
  GptOssWeights weights;

  explicit OnHost(const gpt_oss_decode::DeviceModel& m) {
    const GptOssConfig& c = m.config();
    const gpt_oss_decode::Model& d = m.model();
    weights.embed = WeightMatrix(Tensor(bring(d.embed, c.vocab * c.hidden), DType::bf16, {c.vocab, c.hidden}));
    for (const gpt_oss_decode::Layer& l : d.layers) {
      GptOssLayer y;
      y.attn_norm = vector(l.attn_norm, {c.hidden}), y.mlp_norm = vector(l.mlp_norm, {c.hidden});
      y.qkv = matrix(l.qkv, 0), y.o = matrix(l.o, 0), y.router = matrix(l.router, 0);
      y.b_qkv = vector(l.b_qkv, {c.qkv_width()}), y.b_o = vector(l.b_o, {c.hidden}),
      y.b_router = vector(l.b_router, {c.experts});
      y.sinks = vector(l.sinks, {c.heads});
      y.gate_up = matrix(l.gate_up, c.experts), y.down = matrix(l.down, c.experts);
      y.b_gate_up = vector(l.b_gate_up, {c.experts, 2 * c.intermediate}),
      y.b_down = vector(l.b_down, {c.experts, c.hidden});
      weights.layers.push_back(y);
    }
    weights.norm = vector(d.norm, {c.hidden});
    weights.head = matrix(d.head, 0);
  }

 private:
  template <class T> void* bring(const T* from, int64_t n) {
    memory.emplace_back(size_t(n) * sizeof(T));
    gpu::copy_to_host(memory.back().data(), from, n * int64_t(sizeof(T)));
    return memory.back().data();
  }
  Tensor vector(const float* from, Shape shape) { return Tensor(bring(from, shape.numel()), DType::f32, shape); }
  WeightMatrix matrix(const gpt_oss_decode::Matrix& m, int64_t experts) {
    const WeightMatrix w =
        granules_at(bring(m.data, std::max<int64_t>(1, experts) * m.matrix_bytes), m.format, experts, m.rows, m.cols);
    from_device_order(w);
    return w;
  }
};

}  // namespace ingot::testing
