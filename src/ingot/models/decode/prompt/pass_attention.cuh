#pragma once
// The attention of a pass: of the rows of running sequences by one kernel, and of each part of a prompt by its own.
#include "ingot/kernels/attention/attention.h"
#include "ingot/models/decode/batch/batch.h"
#include "ingot/models/decode/prompt/prompt_pass.cuh"
#include "ingot/models/decode/prompt/prompt_rotation.cuh"

namespace ingot::decode {
#ifdef INGOT_PROMPTS_ON_HOST
void attention_on_host(const Attention& a);
#endif

namespace prompts {

struct PassAttention : PromptPass {
  // Layer number `layer`: queries, keys and values, attention, and the product with output.
  void attend(const Layer& l, size_t layer) const {
    const int64_t width = q_width + 2 * kv_width;
    product(l.qkv, l.b_qkv, normed(p.T), matrix(b.qkv, DType::f32, p.T, width, width));
    if (l.q_norm != nullptr)
      normalise_heads({.qkv = b.qkv,
                       .query = l.q_norm,
                       .key = l.k_norm,
                       .T = uint32_t(p.T),
                       .heads = uint32_t(heads),
                       .kv_heads = uint32_t(kv_heads),
                       .dim = uint32_t(c.head_dim),
                       .eps = float(c.norm.eps)},
                      stream);
    if (step_rows > 0) attend_sequences(l);
    for (int64_t i = step_rows, first = step_rows; i < int64_t(parts.size()); first += parts[size_t(i++)].T)
      attend_part(parts[size_t(i)].model->layers[layer], i, first);
    const Tensor mixed = matrix(b.mixed, DType::bf16, p.T, q_width, q_width);
    if (output_in_halves)
      return dense({.x = mixed,
                    .w = l.o.data,
                    .format = l.o.format,
                    .groups = 1,
                    .n = l.o.rows,
                    .bias = l.b_o,
                    .offsets = b.halves,
                    .y = matrix(b.down, DType::f32, 2 * p.T, c.hidden, c.hidden),
                    .parts = 2});
    product_into_residual(l.o, l.b_o, mixed, 0);
  }
  // Attention of the rows that are one token of a sequence each.
  void attend_sequences(const Layer& l) const {
    const uint32_t group = uint32_t(c.heads / c.kv_heads);
    BatchedSequences of = *p.sequences;
    if (!parts.empty()) of.input = b.single_tokens;
    attend_batch(of,
                 {.qkv = b.qkv,
                  .cos = l.cos,
                  .sin = l.sin,
                  .sinks = l.sinks,
                  .keys = l.keys,
                  .values = l.values,
                  .T = 1,
                  .heads = uint32_t(heads),
                  .kv_heads = uint32_t(kv_heads),
                  .dim = uint32_t(c.head_dim),
                  .rows = l.cache_rows,
                  .window = l.window,
                  .parts = batch_parts(l.window, p.capacity),
                  .tiles = decode_attention::tiles_of(1, group),
                  .group = group,
                  .scale = float(c.scale_of_attention()),
                  .mixed_rows = b.mixed},
                 {cache_dim(c), float(c.attention_softcap)}, step_rows, p.device, stream);
  }
  // Attention of part i, whose rows begin at `first`; `l` is the layer in the part's slot.
  void attend_part(const Layer& l, int64_t i, int64_t first) const {
    const auto& [model, T, position] = parts[size_t(i)];
    const int64_t before = l.window > 0 ? std::min<int64_t>(position, l.window - 1) : 0, D = c.head_dim;
    bf16* const q = b.q + first * q_width;
    launch("prompt keys", rotate_kernel, before + T,
           Rotate{.qkv = b.qkv + first * (q_width + 2 * kv_width),
                  .cos = l.cos,
                  .sin = l.sin,
                  .q = q,
                  .keys = l.keys,
                  .values = l.values,
                  .in_order = l.window > 0 ? b.ring_keys : nullptr,
                  .v_in_order = l.window > 0 ? b.ring_values : nullptr,
                  .heads = uint32_t(heads),
                  .kv_heads = uint32_t(kv_heads),
                  .dim = uint32_t(D),
                  .cache_dim = cache_dim(c),
                  .rows = l.cache_rows,
                  .position = uint32_t(position),
                  .before = uint32_t(before)});
    const auto by_head = [&](bf16* data, int64_t rows, int64_t n) {
      return Tensor(data, DType::bf16, {rows, n, D}, device());
    };
    const auto keys = [&, position = position, T = T](bf16* in_order, bf16* cache) {
      if (l.window > 0) return by_head(in_order, before + T, kv_heads);
      Tensor t = by_head(cache, position + T, kv_heads);
      t.stride[0] = cache_dim(c), t.stride[1] = int64_t(l.cache_rows) * cache_dim(c);
      return t;
    };
    const Attention a{.q = by_head(q, T, heads),
                      .k = keys(b.ring_keys, l.keys),
                      .v = keys(b.ring_values, l.values),
                      .cu_q = Tensor(b.rows + 2 * i, DType::i32, {2}, device()),
                      .cu_k = Tensor((l.window > 0 ? b.sliding : b.keys) + 2 * i, DType::i32, {2}, device()),
                      .sinks = c.sinks ? Tensor(const_cast<float*>(l.sinks), DType::f32, {heads}, device()) : Tensor(),
                      .out = by_head(b.mixed + first * q_width, T, heads),
                      .scale = c.scale_of_attention(),
                      .softcap = c.attention_softcap,
                      .window = int64_t(l.window)};
#ifdef INGOT_PROMPTS_ON_HOST
    attention_on_host(a);
#else
    attention(a, stream);
#endif
  }
};

}  // namespace prompts
}  // namespace ingot::decode
