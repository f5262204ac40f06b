#include <algorithm>
#include <cmath>

#include "ingot/gpu/device_limits.h"
#include "ingot/gpu/launch.h"
#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/grouped/grouped.h"
#include "ingot/kernels/grouped/schedule.h"
#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/models/decode/batch/batch.h"
#include "ingot/models/decode/batch/batch_linear.h"
#include "ingot/models/decode/batch/batch_router.cuh"
#include "ingot/models/decode/draft_head/head_launches.h"
#include "ingot/models/decode/megakernel/megakernel.h"
#include "ingot/models/decode/phased/e4m3_inputs.cuh"
#include "ingot/models/decode/phased/vector_stages.h"
#include "ingot/models/decode/prompt/prompt.cuh"
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

// The emulator has no kernels for products and attention. Tests on the CPU provide replacements
// (prompt.emulated.test.cpp).
#if defined(INGOT_EMULATE) && !defined(INGOT_EMULATED_DEVICE)
#define INGOT_PROMPTS_ON_HOST
void attention_on_host(const Attention& a);
#endif
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

namespace {

using prompts::kThreads;

int64_t leading_single_tokens(std::span<const PromptPart> parts) {
  return std::find_if(parts.begin(), parts.end(), [](const PromptPart& part) { return part.T > 1; }) - parts.begin();
}

struct Run {
  const Model& m;
  const PromptBuffers& b;
  const Prompt& p;
  std::span<const PromptPart> parts;  // empty in a step of sequences
  Stream stream;
  const Ranks& ranks;
  const DecoderSpec& c = m.config;
  int64_t S = p.T * bank_choices(c), stride = weight_tile_padded_cols(c.hidden);
  // heads, and below their widths, that this GPU computes
  int64_t kv_heads = m.kv_heads < 0 ? c.kv_heads : m.kv_heads, heads = kv_heads * (c.heads / c.kv_heads);
  int64_t q_width = heads * c.head_dim, kv_width = kv_heads * c.head_dim;  // GPU has
  // The first rows that attend as a step of sequences does: all rows of a step, or the leading parts of one token.
  int64_t step_rows = parts.empty() ? p.T : p.sequences == nullptr ? 0 : leading_single_tokens(parts);
  // In a step, output is too small for all multiprocessors, so K is divided in two; b.down has room for both halves.
  bool halves = parts.empty() && p.T <= int64_t(kMostSequences) && c.experts_per_token >= 2 &&
                q_width > 3 * kWeightTileCols && !adds_later() && grouped_takes_parts(device());
  // In a step, one kernel of clusters computes everything between output and the experts' products.
  bool routes_rows =
      parts.empty() && p.T <= int64_t(kMostSequences) && !adds_later() && gpu::device_limits(device()).hopper &&
      prompts::takes_route_rows(uint32_t(c.hidden), uint32_t(stride), uint32_t(c.experts), uint32_t(bank_choices(c)));

  template <class Kernel, class P>
  void launch(const char* name, Kernel kernel, int64_t grid, const P& params, int64_t threads = kThreads) {
    gpu::launch(name, kernel, {.grid = grid, .block = threads, .overlap = true, .device = p.device}, stream, params);
  }
  Tensor matrix(void* data, DType t, int64_t rows, int64_t cols, int64_t row_stride) const {
    Tensor y(data, t, {rows, cols}, device());
    y.stride[0] = row_stride;
    return y;
  }
#ifdef INGOT_PROMPTS_ON_HOST
  Device device() const { return {}; }
  void attention_of(const Attention& a) { attention_on_host(a); }
#else
  Device device() const { return {Device::cuda, p.device}; }
  void attention_of(const Attention& a) { attention(a, stream); }
#endif
  prompts::Norm norm_of(const float* weight) const {
    return {
        .x = b.x, .y = b.normed, .stride = stride, .weight = weight, .C = uint32_t(c.hidden), .eps = float(c.norm.eps)};
  }
  void norm(const prompts::Norm& n) { launch("prompt norm", prompts::norm_kernel, p.T, n); }
  // Adds the sum of the experts' results to x.
  prompts::Norm with_experts(prompts::Norm n) const {
    n.down = b.down, n.place = b.place, n.weights = b.weights, n.k = uint32_t(c.experts_per_token);
    return n;
  }
  // Adds the two halves of output's sums to x.
  prompts::Norm with_halves(prompts::Norm n) const {
    n.down = b.down, n.place = b.half_rows, n.weights = b.half_weights, n.k = 2;
    return n;
  }
  // Over several GPUs: x += all parts of layer i's output or down, then y = norm(x).
  void norm_of_sum(const float* weight, bool down, size_t i) {
    prompts::RankNorm n{.norm = norm_of(weight),
                        .ranks = ranks,
                        .part = {},
                        .from = down ? ranks.channels : ranks.heads,
                        .what = grid_barrier_of(uint32_t(i), down)};
    std::copy_n(b.parts[down], megakernel::kMostRanks, n.part);
    gpu::launch("prompt part", prompts::say_ready_kernel, {.grid = 1, .block = 32, .overlap = true, .device = p.device},
                stream, ranks.exchange);
    launch("prompt sums and norm", prompts::rank_norm_kernel, p.T, n);
  }
  void norm_after_output(const Layer& l, size_t i) {
    if (ranks.several()) return norm_of_sum(l.mlp_norm, false, i);
    add_branch(0, l.attn_post_norm);
    norm(halves ? with_halves(norm_of(l.mlp_norm)) : norm_of(l.mlp_norm));
  }
  // `weight` is null where the residual stream is needed alone.
  void norm_after_mlp(const Layer& l, const float* weight, size_t i) {
    if (ranks.several()) return norm_of_sum(weight, true, i);
    add_branch(1, l.mlp_post_norm);
    if (l.experts && !c.norm.post) return norm(with_experts(norm_of(weight)));
    if (weight != nullptr) norm(norm_of(weight));
  }
  // x += the norm of an output, where the model has such norms.
  void add_branch(int which, const float* weight) {
    if (c.norm.post)
      add_normed_branch({b.x, b.part[which], stride, weight, uint32_t(p.T), uint32_t(c.hidden), float(c.norm.eps)},
                        stream);
  }
  // The first layer's input, and its norm.
  void embed(const float* weight) {
    prompts::Norm first = norm_of(weight);
    if (c.embedding_scale == 1)
      first.table = m.embed, first.ids = b.ids;
    else
      launch("prompt embedding", prompts::embed_rows_kernel, p.T,
             prompts::ScaledRows{m.embed, b.ids, b.x, stride, uint32_t(c.hidden), float(c.embedding_scale)});
    norm(first);
  }
  // The residual stream behind `layers` layers.
  void keep(size_t layers) {
    if (p.states != nullptr)
      keep_states(*p.states, uint32_t(layers), b.x, stride, uint32_t(p.T), uint32_t(c.hidden), stream);
  }
  void product(const Matrix& w, const float* bias, const Tensor& x, const Tensor& y, bool add = false,
               const int32_t* offsets = nullptr) {
    dense({.x = x,
           .w = w.data,
           .format = w.format,
           .groups = 1,
           .n = w.rows,
           .bias = bias,
           .offsets = offsets != nullptr ? offsets : b.whole,
           .y = y,
           .add = add});
  }
  // A product with one matrix.
  void dense(const GroupedLinear& a) {
#ifndef INGOT_EMULATE
    if (parts.empty() && takes_batch_linear(a)) return batch_linear(a, stream);
#endif
    grouped_linear(a, stream);
  }
  // As Plan::adds_later().
  bool adds_later() const { return ranks.several() || c.norm.post; }
  Tensor normed() const { return matrix(b.normed, DType::bf16, p.T, c.hidden, stride); }
  // Computes the logits of each part's last row.
  void head_of_parts() {
    const int64_t rows = int64_t(parts.size());
    prompts::Norm n = norm_of(m.norm);
    n.rows = p.sequences->input->row;
    launch("prompt ends", prompts::norm_kernel, rows, n);
    product(m.head, nullptr, matrix(b.normed, DType::bf16, rows, c.hidden, stride),
            matrix(b.logits, DType::f32, rows, m.head.rows, c.vocab), false, b.ends);
    cap(rows);
  }
  void cap(int64_t rows) {
    if (c.logit_softcap > 0) cap_logits({b.logits, rows * c.vocab, float(c.logit_softcap)}, stream);
  }

  void attend(const Layer& l, size_t layer) {
    const int64_t width = q_width + 2 * kv_width;
    product(l.qkv, l.b_qkv, normed(), matrix(b.qkv, DType::f32, p.T, width, width));
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
    if (halves)
      return dense({.x = mixed,
                    .w = l.o.data,
                    .format = l.o.format,
                    .groups = 1,
                    .n = l.o.rows,
                    .bias = l.b_o,
                    .offsets = b.halves,
                    .y = matrix(b.down, DType::f32, 2 * p.T, c.hidden, c.hidden),
                    .parts = 2});
    product(l.o, l.b_o, mixed, matrix(adds_later() ? b.part[0] : b.x, DType::f32, p.T, c.hidden, stride),
            !adds_later());
  }
  void attend_sequences(const Layer& l) {
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
  void attend_part(const Layer& l, int64_t i, int64_t first) {
    const auto& [model, T, position] = parts[size_t(i)];
    const int64_t before = l.window > 0 ? std::min<int64_t>(position, l.window - 1) : 0, D = c.head_dim;
    bf16* const q = b.q + first * q_width;
    launch("prompt keys", prompts::rotate_kernel, before + T,
           prompts::Rotate{.qkv = b.qkv + first * (q_width + 2 * kv_width),
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
    attention_of({.q = by_head(q, T, heads),
                  .k = keys(b.ring_keys, l.keys),
                  .v = keys(b.ring_values, l.values),
                  .cu_q = Tensor(b.rows + 2 * i, DType::i32, {2}, device()),
                  .cu_k = Tensor((l.window > 0 ? b.sliding : b.keys) + 2 * i, DType::i32, {2}, device()),
                  .sinks = c.sinks ? Tensor(const_cast<float*>(l.sinks), DType::f32, {heads}, device()) : Tensor(),
                  .out = by_head(b.mixed + first * q_width, T, heads),
                  .scale = c.scale_of_attention(),
                  .softcap = c.attention_softcap,
                  .window = int64_t(l.window)});
  }
  // Computes the logits of the router and chooses the experts.
  void choose(const Layer& l, const prompts::Choose& choose) {
    const int64_t E = c.experts, tokens = (p.T + prompts::kRouted - 1) / prompts::kRouted;
    const bool few = p.T <= kMostRouted, here = few && E <= int64_t(prompts::kMostChosenHere);
    if (few)
      launch("prompt router", prompts::route_kernel, int64_t(l.router.row_tiles) * tokens,
             prompts::Route{.x = b.normed,
                            .w = l.router.data,
                            .bias = l.b_router,
                            .logits = b.router,
                            .stride = stride,
                            .row_tile_bytes = l.router.row_tile_bytes,
                            .T = uint32_t(p.T),
                            .E = uint32_t(E),
                            .C = uint32_t(c.hidden),
                            .weight_tiles = l.router.weight_tiles,
                            .arrived = here ? b.arrived : nullptr,
                            .choose = choose},
             prompts::kRouteThreads);
    else
      product(l.router, l.b_router, normed(), matrix(b.router, DType::f32, p.T, E, E));
    if (!here) launch("prompt choice", prompts::choose_kernel, (p.T + prompts::kWarps - 1) / prompts::kWarps, choose);
  }
  prompts::Places places_of(const uint32_t* chosen) const {
    return {.chosen = chosen,
            .place = b.place,
            .offsets = b.offsets,
            .S = uint32_t(S),
            .E = uint32_t(c.experts),
            .count = parts.empty() ? &p.sequences->input->count : nullptr,
            .k = uint32_t(c.experts_per_token)};
  }
  void route(const Layer& l, uint32_t* chosen) {
    choose(l, {b.router, chosen, b.weights, uint32_t(p.T), uint32_t(c.experts), uint32_t(c.experts_per_token)});
    place_and_gather(places_of(chosen));
  }
  // As norm_after_output() and route(), where `routes_rows`.
  void norm_and_route(const Layer& l, uint32_t* chosen) {
    const uint32_t E = uint32_t(c.experts), k = uint32_t(c.experts_per_token), T = uint32_t(p.T);
    const bool one_cluster = T <= prompts::kRouted;
    const prompts::RouteRows rows{.norm = norm_of(l.mlp_norm),
                                  .halves = halves ? b.down : nullptr,
                                  .route = {.x = nullptr,
                                            .w = l.router.data,
                                            .bias = l.b_router,
                                            .logits = nullptr,
                                            .stride = stride,
                                            .row_tile_bytes = l.router.row_tile_bytes,
                                            .T = T,
                                            .E = E,
                                            .C = uint32_t(c.hidden),
                                            .weight_tiles = l.router.weight_tiles,
                                            .choose = {nullptr, chosen, b.weights, T, E, k}},
                                  .places = places_of(chosen),
                                  .gathered = one_cluster ? b.gathered : nullptr};
    gpu::launch("batch norm and router", prompts::route_rows_kernel,
                {.grid = (p.T + prompts::kRouted - 1) / prompts::kRouted * prompts::kRouteCluster,
                 .block = prompts::kRouteRowsThreads,
                 .cluster = prompts::kRouteCluster,
                 .overlap = true,
                 .device = p.device},
                stream, rows);
    if (!one_cluster) place_and_gather(places_of(chosen));
  }
  void place_and_gather(const prompts::Places& places) {
    const prompts::Gather gather{b.normed, b.gathered, b.place, stride, places.k};
    if (S <= int64_t(prompts::kFewChoices))
      return launch("prompt places and rows", prompts::place_and_gather_kernel, p.T,
                    prompts::PlaceAndGather{places, gather});
    launch("prompt places", prompts::places_kernel, places.E, places);
    launch("prompt rows", prompts::gather_kernel, p.T, gather);
  }
  // Rounds the inputs of the experts in place, where the model rounds them.
  void round_inputs(bf16* rows, int64_t row_stride, int64_t numbers) {
    if (!c.e4m3_inputs) return;
    gpu::launch("prompt rounded inputs", round_rows_kernel<false>,
                rounding_launch(uint32_t(S), uint32_t(numbers), p.device), stream,
                RoundedRows{reinterpret_cast<char*>(rows), 2 * row_stride, uint32_t(S), uint32_t(numbers)});
  }
  void gate_rows(const Layer& l, int64_t rows) {
    launch("prompt gate", prompts::gate_rows_kernel, rows,
           prompts::GateRows{b.gate_up, b.hidden, weight_tile_padded_cols(l.down.cols), l.down.cols, gate_of(c)});
  }
  void dense_mlp(const Layer& l) {
    const int64_t channels = l.down.cols;
    product(l.gate_up, l.b_gate_up, normed(), matrix(b.gate_up, DType::f32, p.T, 2 * channels, 2 * channels));
    gate_rows(l, p.T);
    product(l.down, l.b_down, matrix(b.hidden, DType::bf16, p.T, channels, weight_tile_padded_cols(channels)),
            matrix(adds_later() ? b.part[1] : b.x, DType::f32, p.T, c.hidden, stride), !adds_later());
  }
  void experts(const Layer& l) {
    const int64_t channels = l.down.cols;
    const bool fused = is_clamped_gate(c);  // the product applies the gate
    round_inputs(b.gathered, stride, c.hidden);
    const Tensor h = matrix(b.hidden, DType::bf16, S, channels, weight_tile_padded_cols(channels));
    grouped_linear({.x = matrix(b.gathered, DType::bf16, S, c.hidden, stride),
                    .w = l.gate_up.data,
                    .format = l.gate_up.format,
                    .groups = c.experts,
                    .n = l.gate_up.rows,
                    .bias = l.b_gate_up,
                    .offsets = b.offsets,
                    .y = fused ? h : matrix(b.gate_up, DType::f32, S, 2 * channels, 2 * channels),
                    .limit = float(c.gate.limit),
                    .alpha = float(c.gate.alpha),
                    .claims = b.claims},
                   stream);
    if (!fused) gate_rows(l, S);
    round_inputs(b.hidden, weight_tile_padded_cols(channels), channels);
    grouped_linear({.x = h,
                    .w = l.down.data,
                    .format = l.down.format,
                    .groups = c.experts,
                    .n = l.down.rows,
                    .bias = l.b_down,
                    .offsets = b.offsets,
                    .y = matrix(b.down, DType::f32, S, c.hidden, c.hidden),
                    .claims = b.claims},
                   stream);
    if (!adds_later()) return;
    prompts::Norm part = with_experts(norm_of(nullptr));
    part.x = b.part[1], part.first_part = true;
    norm(part);
  }
};

}  // namespace

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

void run_prompt(const Model& m, const Buffers& buffers, const PromptBuffers& b, const Prompt& p, Stream stream) {
  const Ranks& ranks = buffers.ranks;
  const bool is_step = p.sequences != nullptr && p.parts.empty();
  const PromptPart only{&m, p.T, p.position};
  const std::span<const PromptPart> parts = is_step           ? std::span<const PromptPart>()
                                            : p.parts.empty() ? std::span(&only, 1)
                                                              : p.parts;
  Run r{m, b, p, parts, stream, ranks};
  const int64_t last = is_step ? p.T : int64_t(p.parts.size());
  prompts::Lengths lengths{.whole = b.whole,
                           .ends = b.ends,
                           .halves = b.halves,
                           .half_rows = b.half_rows,
                           .half_weights = b.half_weights,
                           .rows = b.rows,
                           .keys = b.keys,
                           .sliding = b.sliding,
                           .T = int32_t(p.T),
                           .last = int32_t(last),
                           .parts = uint32_t(parts.size()),
                           .part = {}};
  for (size_t i = 0; i < parts.size(); ++i) {
    const int64_t before = std::min<int64_t>(parts[i].position, m.config.window_reach());
    lengths.part[i] = {int32_t(parts[i].T), int32_t(parts[i].position + parts[i].T), int32_t(before + parts[i].T)};
  }
  gpu::launch("prompt lengths", prompts::lengths_kernel,
              {.grid = 1, .block = kMostParts, .overlap = true, .device = p.device}, stream, lengths);
  if (is_step) gather_batch(*p.sequences, b.ids, p.T, p.device, stream);
  for (size_t i = 0; i < m.layers.size(); ++i) {
    const Layer& l = m.layers[i];
    i == 0 ? r.embed(l.attn_norm) : r.norm_after_mlp(m.layers[i - 1], l.attn_norm, i - 1);
    r.keep(i);
    if (ranks.of(ranks.heads)) r.attend(l, i);
    uint32_t* const chosen = b.chosen + int64_t(i) * r.S;
    if (l.experts && r.routes_rows) {
      r.norm_and_route(l, chosen);
      r.experts(l);
      continue;
    }
    r.norm_after_output(l, i);
    if (!l.experts) {
      if (ranks.of(ranks.channels)) r.dense_mlp(l);
      continue;
    }
    r.route(l, chosen);
    if (ranks.of(ranks.channels)) r.experts(l);
  }
  const bool all_rows = is_step || (p.sequences == nullptr && p.head_rows > 1);
  r.norm_after_mlp(m.layers.back(), all_rows ? m.norm : nullptr, m.layers.size() - 1);
  r.keep(m.layers.size());
  if (all_rows && ranks.of(ranks.ids)) {
    r.product(m.head, nullptr, r.normed(), r.matrix(b.logits, DType::f32, p.T, m.head.rows, m.config.vocab));
    r.cap(p.T);
  }
  if (p.sequences != nullptr) {
    if (!is_step) r.head_of_parts();
    return scatter_batch(*p.sequences,
                         {.logits = b.logits,
                          .T = last,
                          .ids = m.config.vocab,
                          .vocab = p.vocab > 0 ? p.vocab : m.config.vocab,
                          .stop = buffers.stop},
                         p.device, stream);
  }
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

}  // namespace ingot::decode
