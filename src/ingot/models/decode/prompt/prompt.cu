#include <algorithm>

#include "ingot/kernels/grouped/grouped.h"
#include "ingot/kernels/grouped/schedule.h"
#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/models/decode/batch/batch.h"
#include "ingot/models/decode/prompt/pass_attention.cuh"
#include "ingot/models/decode/prompt/pass_mlp.cuh"
#include "ingot/models/decode/prompt/pass_norms.cuh"
#include "ingot/models/decode/prompt/prompt.h"

namespace ingot::decode {

int64_t lay_out(const DecoderSpec& c, int64_t T, bool several, char* memory, PromptBuffers& b) {
  int64_t at = 0;
  const auto take = [&](auto*& p, int64_t n) {
    p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(memory + at);
    at += (n * int64_t(sizeof(*p)) + 255) / 256 * 256;
  };
  const int64_t S = T * bank_choices(c), row = weight_tile_padded_cols(c.hidden);
  take(b.ids, T);
  take(b.whole, 2);
  take(b.ends, 2);
  take(b.halves, 3);
  take(b.half_rows, 2 * kMostSequences);
  take(b.half_weights, 2 * kMostSequences);
  take(b.rows, 2 * kMostParts);
  take(b.keys, 2 * kMostParts);
  take(b.sliding, 2 * kMostParts);
  take(b.single_tokens, 1);
  take(b.x, T * row);
  take(b.normed, T * row);
  take(b.qkv, T * c.qkv_width());
  take(b.q, T * c.q_width());
  take(b.mixed, T * c.q_width());
  take(b.ring_keys, (c.window_reach() + T) * c.kv_width());
  take(b.ring_values, (c.window_reach() + T) * c.kv_width());
  take(b.router, T * c.experts);
  take(b.chosen, c.layers * S);
  take(b.weights, S);
  take(b.place, S);
  take(b.offsets, c.experts + 1);
  take(b.arrived, kMostRouted / prompts::kRouted);
  take(b.claims, 1);
  take(b.gathered, S * row);
  take(b.hidden, S * weight_tile_padded_cols(c.intermediate));
  take(b.down, S * c.hidden);
  if (has_dense_mlp(c) || !is_clamped_gate(c)) take(b.gate_up, (c.experts > 0 ? S : T) * 2 * c.intermediate);
  take(b.logits, std::min(T, kPromptRows) * c.vocab);
  if (several || c.norm.post)
    for (float*& part : b.part) take(part, T * row);
  return at;
}

int64_t most_prompt_tokens(const DecoderSpec& c) {
  return has_dense_mlp(c) || !is_clamped_gate(c) ? kPromptTokens / 4 : kPromptTokens;
}

#if !defined(INGOT_HAS_CUDA_GROUPED) && !defined(INGOT_PROMPTS_ON_HOST)
bool prompts_take(const DecoderSpec&) { return false; }
std::vector<int> prompt_kernels(const Model&, const Prompt&) { return {}; }
void run_prompt(const Model&, const Buffers&, const PromptBuffers&, const Prompt&, Stream) {
  fail(ErrorCode::unsupported, "decode: found a build without matrix kernels, expected one made with INGOT_CUDA=ON");
}
#else

bool prompts_take(const DecoderSpec& c) {
  return c.head_dim % 8 == 0 && c.experts_per_token <= int64_t(prompts::kMostChoices) &&
         c.experts <= int64_t(grouped::kMostGroups);
}

std::vector<int> prompt_kernels(const Model& m, const Prompt& p) {
  const Layer& l = m.layers[0];
  const int64_t sms = gpu::sm_count(p.device), S = l.experts ? p.T * m.config.experts_per_token : p.T,
                E = l.experts ? m.config.experts : 1;
  const bool fused = l.experts && is_clamped_gate(m.config);
  const auto product = [&](const Matrix& w, int64_t rows, int64_t groups, bool gated = false) {
    const auto tile = grouped::pick_tile(rows, groups, w.row_tiles, sms, w.format, gated);
    return tile.kernel * 100 + tile.row_tiles;
  };
  return {product(l.qkv, p.T, 1),
          product(l.o, p.T, 1),
          product(l.gate_up, S, E, fused),
          product(l.down, S, E),
          l.experts && p.T > kMostRouted ? product(l.router, p.T, 1) : 0,
          p.head_rows > 1 ? product(m.head, p.T, 1) : 0,
          int(std::min(p.head_rows, 2u))};
}

namespace {

// Writes the numbers of rows and keys that attention and the products read on the device.
void write_lengths(const prompts::PromptPass& pass, int64_t last) {
  const PromptBuffers& b = pass.b;
  prompts::Lengths lengths{.whole = b.whole,
                           .ends = b.ends,
                           .halves = b.halves,
                           .half_rows = b.half_rows,
                           .half_weights = b.half_weights,
                           .rows = b.rows,
                           .keys = b.keys,
                           .sliding = b.sliding,
                           .T = int32_t(pass.p.T),
                           .last = int32_t(last),
                           .parts = uint32_t(pass.parts.size()),
                           .part = {}};
  for (size_t i = 0; i < pass.parts.size(); ++i) {
    const PromptPart& part = pass.parts[i];
    const int64_t before = std::min<int64_t>(part.position, pass.c.window_reach());
    lengths.part[i] = {int32_t(part.T), int32_t(part.position + part.T), int32_t(before + part.T)};
  }
  pass.launch("prompt lengths", prompts::lengths_kernel, 1, lengths, kMostParts);
}

// All layers, up to the last layer's products.
void run_layers(const prompts::PromptPass& pass) {
  const prompts::PassNorms norms{pass};
  const prompts::PassAttention attention{pass};
  const prompts::PassMlp mlp{pass};
  const Ranks& ranks = pass.ranks;
  const std::vector<Layer>& layers = pass.m.layers;
  for (size_t i = 0; i < layers.size(); ++i) {
    const Layer& l = layers[i];
    i == 0 ? norms.embed(l.attn_norm) : norms.norm_after_mlp(layers[i - 1], l.attn_norm, i - 1);
    norms.keep(i);
    if (ranks.of(ranks.heads)) attention.attend(l, i);
    uint32_t* const chosen = pass.b.chosen + int64_t(i) * pass.S;
    const bool by_cluster = l.experts && pass.routes_by_cluster;
    by_cluster ? mlp.norm_and_route(l, chosen) : norms.norm_after_output(l, i);
    if (l.experts && !by_cluster) mlp.route(l, chosen);
    if (!ranks.of(ranks.channels)) continue;
    l.experts ? mlp.experts(l) : mlp.dense_mlp(l);
    if (l.experts && pass.adds_later()) norms.sum_experts();
  }
}

// The logits of the first `rows` rows of b.normed.
void compute_logits(const prompts::PromptPass& pass, int64_t rows, const int32_t* offsets) {
  const DecoderSpec& c = pass.c;
  pass.product(pass.m.head, nullptr, pass.normed(rows),
               pass.matrix(pass.b.logits, DType::f32, rows, pass.m.head.rows, c.vocab), false, offsets);
  if (c.logit_softcap > 0) cap_logits({pass.b.logits, rows * c.vocab, float(c.logit_softcap)}, pass.stream);
}

}  // namespace

void run_prompt(const Model& m, const Buffers& buffers, const PromptBuffers& b, const Prompt& p, Stream stream) {
  const Ranks& ranks = buffers.ranks;
  const bool is_step = p.sequences != nullptr && p.parts.empty();
  const PromptPart only{&m, p.T, p.position};
  const std::span<const PromptPart> parts = is_step           ? std::span<const PromptPart>()
                                            : p.parts.empty() ? std::span(&only, 1)
                                                              : p.parts;
  const prompts::PromptPass pass{m, b, p, parts, stream, ranks};
  const prompts::PassNorms norms{pass};
  const int64_t last = is_step ? p.T : int64_t(p.parts.size());  // rows whose logits go to sequences
  write_lengths(pass, last);
  if (is_step) gather_batch(*p.sequences, b.ids, p.T, p.device, stream);
  run_layers(pass);
  const bool all_rows = is_step || (p.sequences == nullptr && p.head_rows > 1);
  norms.norm_after_mlp(m.layers.back(), all_rows ? m.norm : nullptr, m.layers.size() - 1);
  norms.keep(m.layers.size());
  if (all_rows && ranks.of(ranks.ids)) compute_logits(pass, p.T, nullptr);
  if (p.sequences != nullptr) {
    if (!is_step) {
      norms.norm_of_ends(last);
      compute_logits(pass, last, b.ends);
    }
    return scatter_batch(*p.sequences,
                         {.logits = b.logits,
                          .T = last,
                          .ids = m.config.vocab,
                          .vocab = p.vocab > 0 ? p.vocab : m.config.vocab,
                          .stop = buffers.stop},
                         p.device, stream);
  }
  Buffers head = buffers;
  head.x = b.x, head.x_stride = pass.stride;
  run(m, head,
      {.T = uint32_t(p.T),
       .head_rows = std::min(p.head_rows, 1u),
       .vocab = p.vocab,
       .capacity = p.capacity,
       .phases = kHead},
      stream);
}

#endif

}  // namespace ingot::decode
