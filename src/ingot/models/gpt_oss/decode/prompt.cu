#include <algorithm>
#include <cmath>

#include "ingot/gpu/launch.h"
#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/grouped/grouped.h"
#include "ingot/kernels/grouped/schedule.h"
#include "ingot/kernels/quant/granules.h"
#include "ingot/models/gpt_oss/decode/prompt.cuh"
#include "ingot/models/gpt_oss/decode/prompt.h"

namespace ingot::gpt_oss_decode {

int64_t lay_out(const GptOssConfig& c, int64_t T, char* memory, PromptBuffers& b) {
  int64_t at = 0;
  const auto take = [&](auto*& p, int64_t n) {
    p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(memory + at);
    at += (n * int64_t(sizeof(*p)) + 255) / 256 * 256;
  };
  const int64_t S = T * c.experts_per_token, row = granule_padded_cols(c.hidden);
  take(b.ids, T);
  take(b.whole, 2);
  take(b.keys, 2);
  take(b.sliding, 2);
  take(b.x, T * row);
  take(b.normed, T * row);
  take(b.qkv, T * c.qkv_width());
  take(b.q, T * c.q_width());
  take(b.mixed, T * c.q_width());
  take(b.ring_keys, (c.window - 1 + T) * c.kv_width());
  take(b.ring_values, (c.window - 1 + T) * c.kv_width());
  take(b.router, T * c.experts);
  take(b.chosen, c.layers * S);
  take(b.weights, S);
  take(b.place, S);
  take(b.offsets, c.experts + 1);
  take(b.gathered, S * row);
  take(b.hidden, S * granule_padded_cols(c.intermediate));
  take(b.down, S * c.hidden);
  take(b.logits, std::min(T, kPromptRows) * c.vocab);
  return at;
}

#ifndef INGOT_HAS_CUDA_GROUPED
bool prompts_take(const GptOssConfig&) { return false; }
void run_prompt(const Model&, const Buffers&, const PromptBuffers&, const Prompt&, Stream) {
  fail(ErrorCode::unsupported, "gpt-oss: found a build without matrix kernels, expected one made with INGOT_CUDA=ON");
}
#else

bool prompts_take(const GptOssConfig& c) {
  return c.head_dim % 8 == 0 && c.experts_per_token <= int64_t(prompts::kMostChoices) &&
         c.experts <= int64_t(grouped::kMostGroups);
}

namespace {

using prompts::kThreads;

struct Run {
  const Model& m;
  const PromptBuffers& b;
  const Prompt& p;
  Stream stream;
  const GptOssConfig& c = m.config;
  int64_t S = p.T * c.experts_per_token, stride = granule_padded_cols(c.hidden);

  template <class Kernel, class P> void launch(const char* name, Kernel kernel, int64_t grid, const P& params) {
    gpu::launch(name, kernel, {.grid = grid, .block = kThreads, .overlap = true, .device = p.device}, stream, params);
  }
  Tensor matrix(void* data, DType t, int64_t rows, int64_t cols, int64_t row_stride) const {
    Tensor y(data, t, {rows, cols}, Device{Device::cuda, p.device});
    y.stride[0] = row_stride;
    return y;
  }
  prompts::Norm norm_of(const float* weight) const {
    return {
        .x = b.x, .y = b.normed, .stride = stride, .weight = weight, .C = uint32_t(c.hidden), .eps = float(c.norm_eps)};
  }
  void norm(const prompts::Norm& n) { launch("prompt norm", prompts::norm_kernel, p.T, n); }
  // What the experts of the layer before found, where there was one, joins x.
  prompts::Norm with_experts(prompts::Norm n) const {
    n.down = b.down, n.place = b.place, n.weights = b.weights, n.k = uint32_t(c.experts_per_token);
    return n;
  }
  void product(const Matrix& w, const float* bias, const Tensor& x, const Tensor& y, bool add = false) {
    grouped_linear({.x = x,
                    .w = w.data,
                    .format = w.format,
                    .groups = 1,
                    .n = w.rows,
                    .bias = bias,
                    .offsets = b.whole,
                    .y = y,
                    .add = add},
                   stream);
  }
  Tensor normed() const { return matrix(b.normed, DType::bf16, p.T, c.hidden, stride); }

  void attend(const Layer& l) {
    const int64_t before = l.window > 0 ? std::min<int64_t>(p.position, l.window - 1) : 0, D = c.head_dim;
    product(l.qkv, l.b_qkv, normed(), matrix(b.qkv, DType::f32, p.T, c.qkv_width(), c.qkv_width()));
    launch("prompt keys", prompts::rotate_kernel, before + p.T,
           prompts::Rotate{.qkv = b.qkv,
                           .cos = m.cos,
                           .sin = m.sin,
                           .q = b.q,
                           .keys = l.keys,
                           .values = l.values,
                           .in_order = l.window > 0 ? b.ring_keys : nullptr,
                           .v_in_order = l.window > 0 ? b.ring_values : nullptr,
                           .heads = uint32_t(c.heads),
                           .kv_heads = uint32_t(c.kv_heads),
                           .dim = uint32_t(D),
                           .cache_dim = cache_dim(c),
                           .rows = l.cache_rows,
                           .position = uint32_t(p.position),
                           .before = uint32_t(before)});
    const Device device{Device::cuda, p.device};
    const auto heads = [&](bf16* data, int64_t rows, int64_t n) {
      return Tensor(data, DType::bf16, {rows, n, D}, device);
    };
    const auto keys = [&](bf16* in_order, bf16* cache) {
      if (l.window > 0) return heads(in_order, before + p.T, c.kv_heads);
      Tensor t = heads(cache, p.position + p.T, c.kv_heads);
      t.stride[0] = cache_dim(c), t.stride[1] = int64_t(l.cache_rows) * cache_dim(c);
      return t;
    };
    attention({.q = heads(b.q, p.T, c.heads),
               .k = keys(b.ring_keys, l.keys),
               .v = keys(b.ring_values, l.values),
               .cu_q = Tensor(b.whole, DType::i32, {2}, device),
               .cu_k = Tensor(l.window > 0 ? b.sliding : b.keys, DType::i32, {2}, device),
               .sinks = Tensor(const_cast<float*>(l.sinks), DType::f32, {c.heads}, device),
               .out = heads(b.mixed, p.T, c.heads),
               .scale = 1 / std::sqrt(double(D)),
               .window = int64_t(l.window)},
              stream);
    product(l.o, l.b_o, matrix(b.mixed, DType::bf16, p.T, c.q_width(), c.q_width()),
            matrix(b.x, DType::f32, p.T, c.hidden, stride), true);
  }
  void route(const Layer& l, uint32_t* chosen) {
    const uint32_t E = uint32_t(c.experts), k = uint32_t(c.experts_per_token);
    product(l.router, l.b_router, normed(), matrix(b.router, DType::f32, p.T, E, E));
    launch("prompt choice", prompts::choose_kernel, (p.T + prompts::kWarps - 1) / prompts::kWarps,
           prompts::Choose{b.router, chosen, b.weights, uint32_t(p.T), E, k});
    launch("prompt places", prompts::places_kernel, E, prompts::Places{chosen, b.place, b.offsets, uint32_t(S), E});
    launch("prompt rows", prompts::gather_kernel, S, prompts::Gather{b.normed, b.gathered, b.place, stride, k});
  }
  void experts(const Layer& l) {
    const int64_t width = granule_padded_cols(c.intermediate);
    const Tensor h = matrix(b.hidden, DType::bf16, S, c.intermediate, width);
    grouped_linear({.x = matrix(b.gathered, DType::bf16, S, c.hidden, stride),
                    .w = l.gate_up.data,
                    .format = l.gate_up.format,
                    .groups = c.experts,
                    .n = l.gate_up.rows,
                    .bias = l.b_gate_up,
                    .offsets = b.offsets,
                    .y = h,
                    .limit = float(c.swiglu_limit),
                    .alpha = float(c.swiglu_alpha)},
                   stream);
    grouped_linear({.x = h,
                    .w = l.down.data,
                    .format = l.down.format,
                    .groups = c.experts,
                    .n = l.down.rows,
                    .bias = l.b_down,
                    .offsets = b.offsets,
                    .y = matrix(b.down, DType::f32, S, c.hidden, c.hidden)},
                   stream);
  }
};

}  // namespace

void run_prompt(const Model& m, const Buffers& buffers, const PromptBuffers& b, const Prompt& p, Stream stream) {
  Run r{m, b, p, stream};
  const int64_t before = std::min<int64_t>(p.position, m.config.window - 1);
  gpu::launch("prompt lengths", prompts::lengths_kernel, {.grid = 1, .block = 32, .overlap = true, .device = p.device},
              stream, b.whole, b.keys, b.sliding, int32_t(p.T), int32_t(p.position + p.T), int32_t(before + p.T));
  for (size_t i = 0; i < m.layers.size(); ++i) {
    const Layer& l = m.layers[i];
    prompts::Norm first = r.norm_of(l.attn_norm);
    if (i == 0)
      first.table = m.embed, first.ids = b.ids;
    else
      first = r.with_experts(first);
    r.norm(first);
    r.attend(l);
    r.norm(r.norm_of(l.mlp_norm));
    r.route(l, b.chosen + int64_t(i) * r.S);
    r.experts(l);
  }
  const bool all_rows = p.head_rows > 1;
  r.norm(r.with_experts(r.norm_of(all_rows ? m.norm : nullptr)));
  if (all_rows) r.product(m.head, nullptr, r.normed(), r.matrix(b.logits, DType::f32, p.T, m.head.rows, m.head.rows));
  Buffers head = buffers;
  head.x = b.x, head.x_stride = r.stride;
  run(m, head,
      {.T = uint32_t(p.T),
       .head_rows = std::min(p.head_rows, 1u),
       .vocab = p.vocab,
       .capacity = p.capacity,
       .phases = kHead},
      stream);
}

#endif

}  // namespace ingot::gpt_oss_decode
