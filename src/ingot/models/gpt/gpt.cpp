#include "ingot/models/gpt/gpt.h"

#include "ingot/gpu/allocator.h"
#include "ingot/gpu/device.h"
#include "ingot/kernels/axpby/axpby.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/cross_entropy/cross_entropy.h"
#include "ingot/kernels/embedding/embedding.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/rope/rope.h"
#include "ingot/kernels/scaled_add/scaled_rows.h"
#include "ingot/kernels/softcap/softcap.h"
#include "ingot/models/gpt/adapters/adapter.h"
#include "ingot/models/gpt/block/block.h"
#include "ingot/models/gpt/block/segments.h"

namespace ingot {

using detail::view;

struct Gpt::Impl {
  GptConfig config;
  GptTypes types;
  GptOptions options;
  LayerProgram program;
  ParameterLayout layout;
  detail::Buffers buffers;
  Arena table_memory;
  Tensor cos, sin;
  std::vector<int32_t> scored_cu;  // of a call
  std::vector<int32_t> cached_cu;  // of a call, on the host
  Arena cached_cu_memory;          // on a GPU
  std::vector<int32_t> scored_at;  // of a call: the scored tokens' positions, and their cu_seqlens
  Arena scored_at_memory;          // on a GPU
  Act act;

  // Parameters by role, found once.
  struct LayerParameters {
    const Parameter *attn_norm = nullptr, *mlp_norm = nullptr, *q = nullptr, *k = nullptr, *v = nullptr, *o = nullptr,
                    *up = nullptr, *down = nullptr, *q_gain = nullptr, *attn_scale = nullptr, *mlp_scale = nullptr,
                    *mix = nullptr;
  };
  std::vector<LayerParameters> layer_parameters;
  const Parameter *table = nullptr, *positions = nullptr, *embed_proj = nullptr, *head_proj = nullptr, *head = nullptr,
                  *final_norm = nullptr, *skip_weights = nullptr, *skip_gates = nullptr, *lane_post = nullptr,
                  *lane_resid = nullptr;

  Impl(const GptConfig& c, const GptTypes& t, const GptOptions& o)
      : config(c),
        types(t),
        options(o),
        program(layer_program(c, o.looping)),
        layout(c),
        act(activation_named(c.activation)) {
    INGOT_CHECK(o.capacity >= 1, "gpt: found a capacity of ", o.capacity, " tokens, expected at least 1");
    check_types();
    if (options.max_positions == 0) options.max_positions = config.context;
    find_parameters();
    buffers = detail::plan_buffers(config, program, types, options);
    make_rope_table();
  }

  void check_types() const {
    const DType m = types.master, c = types.compute, a = types.activations;
    INGOT_CHECK(m == DType::f32 || m == DType::f64, "gpt: found weights of ", m, ", expected f32 or f64");
    const bool one = c == m && a == m;
    if (options.device.kind == Device::cpu)
      INGOT_CHECK(one, "gpt: found weights of ", m, " computed with as ", c, " and activations of ", a, " on ",
                  options.device, ", expected one type");
    else
      INGOT_CHECK(one || (m == DType::f32 && c == a && (a == DType::bf16 || a == DType::f16)), "gpt: found weights of ",
                  m, " computed with as ", c, " and activations of ", a, " on ", options.device,
                  ", expected one type, or f32 weights and bf16 or f16 for the other two");
  }

  void find_parameters() {
    const auto optional = [&](bool present, const std::string& name) { return present ? &layout.find(name) : nullptr; };
    for (int64_t i = 0; i < config.layers; ++i) {
      const std::string block = "blocks." + std::to_string(i) + ".";
      LayerParameters p;
      p.attn_norm = optional(config.norm_weight, block + "attn_norm.weight");
      p.mlp_norm = optional(config.norm_weight, block + "mlp_norm.weight");
      p.q = &layout.find(block + "attn.q.weight");
      p.k = &layout.find(block + "attn.k.weight");
      p.v = &layout.find(block + "attn.v.weight");
      p.o = &layout.find(block + "attn.o.weight");
      p.up = &layout.find(block + "mlp.up.weight");
      p.down = &layout.find(block + "mlp.down.weight");
      p.q_gain = optional(config.qk_gain, block + "attn.q_gain");
      p.attn_scale = optional(config.branch_scale, block + "attn_scale");
      p.mlp_scale = optional(config.branch_scale, block + "mlp_scale");
      p.mix = optional(config.resid_mix, block + "resid_mix");
      layer_parameters.push_back(p);
    }
    const int slots = skip_slots(config);
    table = &layout.find("tok_emb.weight");
    positions = optional(config.learned_positions, "pos_emb.weight");
    embed_proj = optional(config.factorised(), "embed_proj.weight");
    head_proj = optional(config.factorised(), "head_proj.weight");
    head = optional(!config.tied_embeddings, "lm_head.weight");
    final_norm = optional(config.norm_weight, "final_norm.weight");
    skip_weights = optional(slots > 0, "skip_weights");
    skip_gates = optional(slots > 0 && config.skip_gates, "skip_gates");
    lane_post = optional(config.lane_start >= 0, "parallel_post_lambdas");
    lane_resid = optional(config.lane_start >= 0, "parallel_resid_lambdas");
  }

  void make_rope_table() {
    if (config.rotary_dim == 0) return;
    // Formed on the host, and copied to the model's device.
    const Shape shape{options.max_positions, config.rotary_dim / 2};
    const auto take_both = [&](Allocator& from) {
      Arena arena(2 * Arena::aligned(types.sums(), shape), from);
      cos = arena.take(types.sums(), shape), sin = arena.take(types.sums(), shape);
      return arena;
    };
    table_memory = take_both(system_memory());
    rope_table(rope_frequencies(config.rotary_dim, config.rope_base, config.rope_scaling), cos, sin);
    if (options.device.kind == Device::cpu) return;
    const Tensor host_cos = cos, host_sin = sin;
    Arena there = take_both(gpu::memory_of(options.device));
    copy({.from = host_cos, .to = cos}, options.stream);
    copy({.from = host_sin, .to = sin}, options.stream);
    gpu::synchronize(options.device, options.stream);  // the host's memory is freed now
    table_memory = std::move(there);
  }

  // Views of `flat` (weights or gradients); an empty flat gives empty views. Products read the copy in their type.
  Tensor get(const GptWeights& flat, const Parameter* p) const {
    if (!flat.master || p == nullptr) return {};
    return layout.view(flat.compute && p->kind != ParameterKind::scalar ? flat.compute : flat.master, *p);
  }
  // A joint view of several parameters of equal width, if adjacent.
  Tensor get_all(const GptWeights& flat, std::initializer_list<const Parameter*> all) const {
    const Tensor first = get(flat, *all.begin());
    const Parameter* last = nullptr;
    int64_t rows = 0;
    for (const Parameter* p : all) {
      if (!first ||
          (last != nullptr && (p->offset != last->offset + last->shape.numel() || p->shape[1] != last->shape[1])))
        return {};
      rows += p->shape[0], last = p;
    }
    return Tensor(first.data, first.dtype, {rows, last->shape[1]}, first.device);
  }
  Tensor get_row(const GptWeights& flat, const Parameter* p, int64_t i) const {
    const Tensor t = get(flat, p);
    return t ? t.row(i) : t;
  }
  detail::LayerViews layer(const GptWeights& flat, int i) const {
    const LayerParameters& p = layer_parameters[size_t(i)];
    return {.attn_norm = get(flat, p.attn_norm),
            .mlp_norm = get(flat, p.mlp_norm),
            .q = get(flat, p.q),
            .k = get(flat, p.k),
            .v = get(flat, p.v),
            .o = get(flat, p.o),
            .up = get(flat, p.up),
            .down = get(flat, p.down),
            .q_gain = get(flat, p.q_gain),
            .attn_scale = get(flat, p.attn_scale),
            .mlp_scale = get(flat, p.mlp_scale),
            .mix_a = get_row(flat, p.mix, 0),
            .mix_b = get_row(flat, p.mix, 1),
            .kv = get_all(flat, {p.k, p.v}),
            .qkv = flat.qkv ? flat.qkv.row(i) : get_all(flat, {p.q, p.k, p.v}),
            .lane_post = get_row(flat, lane_post, i),
            .lane_resid = get_row(flat, lane_resid, i)};
  }
  detail::SkipViews skip(const GptWeights& flat, int slot) const {
    if (slot < 0) return {};
    return {.weight = get_row(flat, skip_weights, slot), .gate = get_row(flat, skip_gates, slot)};
  }

  void check_call(const GptWeights& weights, const TokenBatch& batch, bool needs_targets) const;
  void check_on_host(const TokenBatch& batch) const;
  void check_adapters(const TokenBatch& batch, const GptAdapters* adapters) const;
  detail::CallContext context(const TokenBatch& batch, const GptAdapters* adapters, GptAdapters* grads) {
    scored_cu.assign(1, 0);
    for (const int32_t n : batch.last) scored_cu.push_back(scored_cu.back() + n);
    return {.config = config,
            .tokens = batch.tokens.numel(),
            .block_rows = detail::most_block_rows(options.capacity, options),
            .device = options.device,
            .stream = options.stream,
            .positions = batch.positions,
            .cu_seqlens = batch.cu_seqlens,
            .cu = batch.cu(),
            .scored_cu = batch.last.empty() ? batch.cu() : std::span<const int32_t>(scored_cu),
            .cos = cos,
            .sin = sin,
            .act = act,
            .products = options.products,
            .any_order = options.any_order_segments > 0,
            .linear_workspace = buffers.linear_workspace,
            .adapters = adapters,
            .adapter_grads = grads};
  }
  detail::BlockTensors block(int i, const GptWeights& weights, const Tensor& grads, bool backward) const;

  int64_t embed_width() const { return embed_proj != nullptr ? config.embed_dim : config.dim; }
  Tensor look_up(const GptWeights& weights, const TokenBatch& batch, const Tensor& raw, const Tensor& into) const;
  void embed_forward(const GptWeights& weights, const TokenBatch& batch, MatrixInputs* inputs = nullptr);
  void embed_backward(const GptWeights& weights, const TokenBatch& batch, const Tensor& grads);
  void scale_matrices(const GptWeights& weights);
  void scale_matrices_backward(const GptWeights& weights, const Tensor& grads);
  void blocks_forward(const detail::CallContext& call, const GptWeights& weights);
  void blocks_backward(const detail::CallContext& call, const GptWeights& weights, const Tensor& grads);
  // Whether the backward pass of a layer call adds the gradient of a skip from its input to the gradient of its input.
  bool adds_skip(int i) const {
    if (i >= int(program.layer_calls.size())) return false;
    const LayerCall& next = program.layer_calls[size_t(i)];
    return buffers.skip_grad[size_t(i)] && next.skip_slot < 0 && !next.lanes;
  }
  Tensor stream_out(int64_t tokens);
  Tensor scored_rows(const detail::CallContext& call);
  void head_losses(const detail::CallContext& call, const GptWeights& weights, const TokenBatch& batch,
                   const Tensor& dloss, const Tensor& loss, const Tensor& grads, bool backward);
  void losses_per_segment(LinearCrossEntropy ce, const detail::CallContext& call);
  void head_backward(const detail::CallContext& call, const GptWeights& weights, const Tensor& grads, const Tensor& x);
  void cut(detail::CallContext& call, const TokenBatch& batch);
  void check_cached(const TokenBatch& batch, const CachedSegments& cached) const;
  Tensor cached_offsets(std::span<const int32_t> cu, const CachedSegments& cached);
  void go_on(detail::CallContext& call, const CachedSegments* cached);
  void advance(const detail::CallContext& call);
  void head_logits(const detail::CallContext& call, const GptWeights& weights, const Tensor& rows,
                   const Tensor& logits);
};

void Gpt::Impl::check_call(const GptWeights& weights, const TokenBatch& batch, bool needs_targets) const {
  const int64_t tokens = batch.tokens.numel();
  INGOT_CHECK_EQ(weights.master.numel(), layout.padded_count(), "gpt: length of the flat weights");
  INGOT_CHECK_EQ(weights.master.dtype, types.master, "gpt: dtype of the weights");
  INGOT_CHECK_EQ(bool(weights.compute), types.compute != types.master, "gpt: a copy of the weights in ", types.compute);
  if (weights.compute) {
    INGOT_CHECK_EQ(weights.compute.numel(), layout.padded_count(), "gpt: length of the weights' copy");
    INGOT_CHECK_EQ(weights.compute.dtype, types.compute, "gpt: dtype of the weights' copy");
  }
  INGOT_CHECK_LE(tokens, options.capacity, "gpt: tokens in the batch");
  INGOT_CHECK_EQ(batch.positions.numel(), tokens, "gpt: positions");
  INGOT_CHECK_GE(batch.cu_seqlens.numel(), int64_t(1), "gpt: cu_seqlens");
  if (needs_targets) INGOT_CHECK_EQ(batch.targets.numel(), batch.scored(), "gpt: targets");
  for (const Tensor* t : {&weights.master, &batch.tokens, &batch.positions, &batch.cu_seqlens})
    INGOT_CHECK_EQ(t->device, options.device, "gpt: device of the weights and the batch");
  check_on_host(batch);
}

// Checks the numbers for the host's decisions, which are in host memory for every device of the batch.
void Gpt::Impl::check_on_host(const TokenBatch& batch) const {
  const int64_t tokens = batch.tokens.numel();
  for (const auto& [there, here, name] : {std::tuple(&batch.positions, &batch.positions_on_host(), "positions"),
                                          std::tuple(&batch.cu_seqlens, &batch.cu_on_host(), "cu_seqlens")}) {
    INGOT_CHECK(here->device.kind == Device::cpu, "gpt: found a batch on ", there->device, " without host_", name,
                ", expected its ", name, " in host memory too");
    INGOT_CHECK_EQ(here->numel(), there->numel(), "gpt: length of host_", name);
  }
  const std::span<const int32_t> cu = batch.cu();
  INGOT_CHECK_EQ(cu.front(), 0, "gpt: start of cu_seqlens");
  for (size_t s = 0; s + 1 < cu.size(); ++s) INGOT_CHECK_LE(cu[s], cu[s + 1], "gpt: cu_seqlens at segment ", s);
  INGOT_CHECK_EQ(int64_t(cu.back()), tokens, "gpt: end of cu_seqlens");
  if (!batch.last.empty()) {
    INGOT_CHECK_GT(options.most_scored, 0, "gpt: numbers of scored tokens need most_scored in the options");
    INGOT_CHECK_EQ(batch.last.size(), cu.size() - 1, "gpt: numbers of scored tokens, one per segment");
  }
  for (size_t s = 0; s < batch.last.size(); ++s)
    INGOT_CHECK(batch.last[s] >= 0 && batch.last[s] <= cu[s + 1] - cu[s], "gpt: found ", batch.last[s],
                " scored tokens of segment ", s, ", expected 0 to its ", cu[s + 1] - cu[s]);
  if (options.most_scored > 0) INGOT_CHECK_LE(batch.scored(), options.most_scored, "gpt: scored tokens of the batch");
  const int64_t limit = config.learned_positions ? config.context : options.max_positions;
  const int32_t* at = batch.positions_on_host().ptr<int32_t>();
  if (config.learned_positions || config.rotary_dim > 0)
    for (int64_t t = 0; t < tokens; ++t)
      INGOT_CHECK(at[t] >= 0 && at[t] < limit, "gpt: found position ", at[t], " at token ", t, ", expected 0 to ",
                  limit - 1);
}

void Gpt::Impl::check_adapters(const TokenBatch& batch, const GptAdapters* adapters) const {
  if (adapters == nullptr) return;
  INGOT_CHECK_EQ(adapters->layer_calls.size(), program.layer_calls.size(), "gpt: adapters, one set per layer call");
  INGOT_CHECK_GT(options.max_adapter_rank, 0, "gpt: adapters need max_adapter_rank in the options");
  const std::span<const int32_t> cu = batch.cu();
  int64_t segments = int64_t(cu.size()) - 1;
  while (segments > 0 && cu[size_t(segments) - 1] == cu[size_t(segments)])
    --segments;  // empty segments have no adapters
  const auto fits = [&](const AdapterPair& p, const char* name) {
    if (!p.a) return;
    INGOT_CHECK_GE(p.a.size(0), segments, "gpt: ", name, " adapters, one per segment");
    INGOT_CHECK_LE(p.a.size(1), options.max_adapter_rank, "gpt: rank of the ", name, " adapter");
    INGOT_CHECK_EQ(p.a.size(1), p.b.size(2), "gpt: ranks of the ", name, " adapter's two matrices");
  };
  for (const LayerCallAdapters& a : adapters->layer_calls) {
    fits(a.q, "q");
    fits(a.k, "k");
    fits(a.v, "v");
    fits(a.o, "o");
    fits(a.mlp, "mlp");
  }
  fits(adapters->head, "head");
}

// --- embedding

// The tokens' rows of the table, normed where the config says so, in `into`; `raw` receives the rows before the norm.
Tensor Gpt::Impl::look_up(const GptWeights& weights, const TokenBatch& batch, const Tensor& raw,
                          const Tensor& into) const {
  const Shape shape{batch.tokens.numel(), embed_width()};
  const Tensor x = view(into, shape), rows = config.embed_norm ? view(raw, shape) : x;
  embedding({.ids = batch.tokens, .table = get(weights, table), .y = rows}, options.stream);
  if (config.embed_norm) rmsnorm({.x = rows, .y = x, .eps = config.norm_eps}, options.stream);
  return x;
}

// Row, norm, projection, learned position.
void Gpt::Impl::embed_forward(const GptWeights& weights, const TokenBatch& batch, MatrixInputs* inputs) {
  const Tensor x0 = view(buffers.in0[0], {batch.tokens.numel(), config.dim});
  if (embed_proj == nullptr) {
    look_up(weights, batch, buffers.embedded, x0);
  } else {
    const Tensor low = look_up(weights, batch, buffers.embedded, buffers.embed_low);
    if (inputs != nullptr) inputs->seen(MatrixInput::embed_proj, 0, low);
    linear({.x = low,
            .w = get(weights, embed_proj),
            .y = x0,
            .products = options.products,
            .workspace = buffers.linear_workspace},
           options.stream);
  }
  if (positions != nullptr)
    embedding({.ids = batch.positions, .table = get(weights, positions), .y = x0, .accumulate = true}, options.stream);
}

// g0 holds the gradient of the first layer call's input; x0_grad holds the gradient of x0 through the residual mixes.
void Gpt::Impl::embed_backward(const GptWeights& weights, const TokenBatch& batch, const Tensor& grads) {
  if (!grads) return;
  const int64_t T = batch.tokens.numel();
  const Shape shape{T, embed_width()};
  Tensor g = view(buffers.g0, {T, config.dim});
  if (config.resid_mix) axpby({.x = view(buffers.x0_grad, {T, config.dim}), .y = g}, options.stream);
  if (positions != nullptr)
    embedding_backward({.ids = batch.positions, .dy = g, .dtable = get(grads, positions)}, options.stream);
  if (embed_proj != nullptr) {
    const Tensor low = look_up(weights, batch, buffers.embedded_again, buffers.embed_low_again);
    const Tensor low_grad = view(buffers.embed_low_grad, shape);
    linear_backward({.dy = g,
                     .x = low,
                     .w = get(weights, embed_proj),
                     .dx = low_grad,
                     .dw = get(grads, embed_proj),
                     .products = options.products,
                     .workspace = buffers.linear_workspace},
                    options.stream);
    g = low_grad;
  }
  if (config.embed_norm) {
    const Tensor rows = view(buffers.embedded_again, shape);
    embedding({.ids = batch.tokens, .table = get(weights, table), .y = rows}, options.stream);
    rmsnorm_backward({.dy = g, .s = rows, .dx = g, .eps = config.norm_eps}, options.stream);
  }
  embedding_backward({.ids = batch.tokens, .dy = g, .dtable = get(grads, table)}, options.stream);
}

// --- blocks

detail::BlockTensors Gpt::Impl::block(int i, const GptWeights& weights, const Tensor& grads, bool backward) const {
  const LayerCall& a = program.layer_calls[size_t(i)];
  const size_t n = size_t(i);
  return {.index = i,
          .layer_call = &a,
          .w = layer(weights, a.layer),
          .dw = layer(grads, a.layer),
          .skip_w = skip(weights, a.skip_slot),
          .skip_dw = skip(grads, a.skip_slot),
          .skip = a.skip_from >= 0 ? buffers.in0[size_t(a.skip_from) + 1] : Tensor(),
          .in0 = buffers.in0[n],
          .in1 = buffers.in1[n],
          .x0 = buffers.in0[0],
          .out0 = buffers.in0[n + 1],
          .out1 = buffers.in1[n + 1],
          .saved = buffers.saved[n],
          .scratch = backward ? buffers.backward[n] : buffers.forward[n]};
}

// Folds the scales of the branches into the matrices before them.
void Gpt::Impl::scale_matrices(const GptWeights& weights) {
  for (size_t i = 0; i < buffers.scaled_of.size(); ++i) {
    const detail::ScaledMatrices& s = buffers.scaled_of[i];
    if (!s.o) continue;
    const detail::LayerViews w = layer(weights.master, int(i));
    scaled_rows({.x = w.o, .scale = w.attn_scale, .y = s.o}, options.stream);
    scaled_rows({.x = w.down, .scale = w.mlp_scale, .y = s.down}, options.stream);
  }
}
void Gpt::Impl::scale_matrices_backward(const GptWeights& weights, const Tensor& grads) {
  for (size_t i = 0; i < buffers.scaled_of.size(); ++i) {
    const detail::ScaledMatrices& s = buffers.scaled_of[i];
    if (!s.o) continue;
    const detail::LayerViews w = layer(weights.master, int(i)), dw = layer(grads, int(i));
    scaled_rows_backward({.x = w.o, .scale = w.attn_scale, .dy = s.o_grad, .dx = dw.o, .dscale = dw.attn_scale},
                         options.stream);
    scaled_rows_backward({.x = w.down, .scale = w.mlp_scale, .dy = s.down_grad, .dx = dw.down, .dscale = dw.mlp_scale},
                         options.stream);
  }
}

void Gpt::Impl::blocks_forward(const detail::CallContext& call, const GptWeights& weights) {
  if (call.folds_scales) scale_matrices(weights);
  for (int i = 0; i < int(program.layer_calls.size()); ++i) {
    detail::BlockTensors b = block(i, weights, {}, false);
    if (call.folds_scales && !b.layer_call->lanes) b.scaled = &buffers.scaled_of[size_t(b.layer_call->layer)];
    if (call.cut && i + 1 == int(program.layer_calls.size())) b.scored = &buffers.scored_rows;
    detail::block_forward(call, b);
  }
}

void Gpt::Impl::blocks_backward(const detail::CallContext& call, const GptWeights& weights, const Tensor& grads) {
  INGOT_CHECK(!grads || !weights.qkv, "gpt: found weights with a copy of q, k and v, expected none that get gradients");
  const Shape shape{call.tokens, config.dim};
  const bool of_x0 = config.resid_mix && grads;  // with frozen weights this gradient is not needed
  if (of_x0) fill({.to = view(buffers.x0_grad, shape)}, options.stream);
  if (call.folds_scales && grads) fill({.to = buffers.scaled_grads}, options.stream);
  for (int i = int(program.layer_calls.size()) - 1; i >= 0; --i) {
    const LayerCall& a = program.layer_calls[size_t(i)];
    detail::BlockGradients g{
        .g0 = buffers.g0, .g1 = buffers.g1, .x0_grad = of_x0 ? buffers.x0_grad : Tensor(), .of_input = i > 0 || grads};
    if (a.skip_from >= 0) g.skip_grad = buffers.skip_grad[size_t(a.skip_from) + 1];
    // A skip from this layer call's output, where the next layer call has not added its gradient.
    if (const Tensor& from_skip = buffers.skip_grad[size_t(i) + 1]; from_skip && !adds_skip(i + 1))
      axpby({.x = view(from_skip, shape), .y = view(buffers.g0, shape)}, options.stream);
    if (i > 0 && adds_skip(i)) g.more = buffers.skip_grad[size_t(i)];
    detail::BlockTensors b = block(i, weights, grads, true);
    if (call.cut && i + 1 == int(program.layer_calls.size())) b.scored = &buffers.scored_rows;
    if (call.folds_scales && !b.layer_call->lanes) b.scaled = &buffers.scaled_of[size_t(b.layer_call->layer)];
    detail::block_backward(call, b, g);
  }
  if (call.folds_scales && grads) scale_matrices_backward(weights, grads);
}

// --- head

// The output of the last block: x, or the combination of the lanes.
Tensor Gpt::Impl::stream_out(int64_t tokens) {
  const Shape shape{tokens, config.dim};
  const Tensor lane0 = view(buffers.in0.back(), shape);
  if (!program.layer_calls.back().lanes || config.lane_output == "attn") return lane0;
  const Tensor lane1 = view(buffers.in1.back(), shape);
  if (config.lane_output == "mlp") return lane1;
  const Tensor x = view(buffers.final, shape);
  copy({.from = lane0, .to = x}, options.stream);
  axpby({.x = lane1, .y = x, .alpha = 0.5, .beta = 0.5}, options.stream);
  return x;
}

// The scored rows of the output.
Tensor Gpt::Impl::scored_rows(const detail::CallContext& call) {
  const Tensor x = stream_out(call.rows_out());
  if (call.scored() == call.rows_out()) return x;
  const Tensor rows = view(buffers.scored, {call.scored(), config.dim});
  detail::for_each_run(call.cu, call.scored_cu, [&](const detail::SegmentRun& run) {
    if (run.scored > 0) copy({.from = run.last_of(x), .to = run.packed_of(rows)}, options.stream);
  });
  return rows;
}

void Gpt::Impl::head_losses(const detail::CallContext& call, const GptWeights& weights, const TokenBatch& batch,
                            const Tensor& dloss, const Tensor& loss, const Tensor& grads, bool backward) {
  const int64_t T = call.scored();
  const Tensor x = scored_rows(call), f = view(buffers.head_normed, {T, config.dim});
  rmsnorm(
      {.x = x, .w = get(weights, final_norm), .y = f, .rstd = view(buffers.final_rstd, {T}), .eps = config.norm_eps},
      options.stream);
  LinearCrossEntropy ce{.x = f,
                        .w = get(weights, head != nullptr ? head : table),
                        .targets = batch.targets,
                        .loss = loss,
                        .workspace = buffers.head_workspace,
                        .softcap = config.softcap,
                        .z_loss = config.z_loss,
                        .products = options.products};
  if (head_proj != nullptr) {
    if (call.inputs != nullptr) call.inputs->seen(MatrixInput::head_proj, 0, f);
    ce.x = view(buffers.head_in, {T, config.embed_dim});
    linear({.x = f,
            .w = get(weights, head_proj),
            .y = ce.x,
            .products = options.products,
            .workspace = buffers.linear_workspace},
           options.stream);
  }
  if (call.inputs != nullptr) call.inputs->seen(MatrixInput::head, 0, ce.x);
  if (backward) {
    ce.dloss = dloss;
    ce.dx = head_proj != nullptr ? view(buffers.head_in_grad, {T, config.embed_dim})
                                 : view(buffers.head_normed_grad, {T, config.dim});
    ce.dw = get(grads, head != nullptr ? head : table);
  }
  const bool adapted = call.adapters != nullptr && call.adapters->head.a;
  if (adapted)
    losses_per_segment(ce, call);
  else
    linear_cross_entropy(ce, options.stream);
  if (backward) head_backward(call, weights, grads, x);
}

// With head adapters the logits depend on the document: x W^T + (f A_s^T) B_s^T.
void Gpt::Impl::losses_per_segment(LinearCrossEntropy ce, const detail::CallContext& call) {
  const AdapterPair& pair = call.adapters->head;
  const AdapterPair* grad =
      call.adapter_grads != nullptr && call.adapter_grads->head.a ? &call.adapter_grads->head : nullptr;
  const int64_t rank = pair.a.size(1), T = call.scored();
  const Tensor f = view(buffers.head_normed, {T, config.dim}), df = view(buffers.head_normed_grad, {T, config.dim});
  const Tensor low = view(buffers.head_low, {T, rank}), low_grad = view(buffers.head_low_grad, {T, rank});
  std::span<const int32_t> cu = call.scored_cu;
  while (cu.size() > 2 && cu[cu.size() - 2] == cu.back())
    cu = cu.first(cu.size() - 1);  // the last segment has no adapters
  const auto product = [&](const Tensor& a, bool ta, const Tensor& b, bool tb, const Tensor& into, double beta) {
    matmul_each({.a = a,
                 .b = b,
                 .c = into,
                 .transpose_a = ta,
                 .transpose_b = tb,
                 .beta = beta,
                 .products = options.products,
                 .workspace = buffers.linear_workspace},
                options.stream);
  };
  detail::for_each_run(cu, cu, [&](const detail::SegmentRun& run) {
    product(run.of(f), false, run.each_of(pair.a), true, run.of(low), 0);
  });
  const auto of_each = [&](const Tensor& t) { return t.slice(0, 0, int64_t(cu.size()) - 1); };
  ce.x2 = low, ce.w2 = of_each(pair.b), ce.cu2 = cu;
  if (ce.dloss) ce.dx2 = low_grad;
  const bool written = grad != nullptr && call.adapter_grads->written;
  if (ce.dloss && grad != nullptr) ce.dw2 = of_each(grad->b);
  if (ce.dw2 && written) fill({.to = ce.dw2}, options.stream);
  linear_cross_entropy(ce, options.stream);
  if (!ce.dloss) return;
  if (head_proj != nullptr) fill({.to = df}, options.stream);  // head_backward adds the projection's part
  detail::for_each_run(cu, cu, [&](const detail::SegmentRun& run) {
    product(run.of(low_grad), false, run.each_of(pair.a), false, run.of(df), 1);
    if (grad != nullptr) product(run.of(low_grad), true, run.of(f), false, run.each_of(grad->a), written ? 0 : 1);
  });
}

void Gpt::Impl::head_backward(const detail::CallContext& call, const GptWeights& weights, const Tensor& grads,
                              const Tensor& x) {
  const int64_t T = call.scored();
  const Shape shape{T, config.dim}, all{call.rows_out(), config.dim};
  const Tensor df = view(buffers.head_normed_grad, shape), g0 = view(buffers.g0, all);
  const Tensor dx = T == call.rows_out() ? g0 : view(buffers.scored_grad, shape);
  if (head_proj != nullptr) {
    const bool adapted = call.adapters != nullptr && call.adapters->head.a;
    linear_backward({.dy = view(buffers.head_in_grad, {T, config.embed_dim}),
                     .x = view(buffers.head_normed, shape),
                     .w = get(weights, head_proj),
                     .dx = df,
                     .dw = get(grads, head_proj),
                     .accumulate_dx = adapted,
                     .products = options.products,
                     .workspace = buffers.linear_workspace},
                    options.stream);
  }
  rmsnorm_backward({.dy = df,
                    .s = x,
                    .w = get(weights, final_norm),
                    .rstd = view(buffers.final_rstd, {T}),
                    .dx = dx,
                    .dw = get(grads, final_norm),
                    .workspace = buffers.embed_workspace,
                    .eps = config.norm_eps},
                   options.stream);
  if (T < call.rows_out()) {
    fill({.to = g0}, options.stream);
    detail::for_each_run(call.cu, call.scored_cu, [&](const detail::SegmentRun& run) {
      if (run.scored > 0) copy({.from = run.packed_of(dx), .to = run.last_of(g0)}, options.stream);
    });
  }
  if (!program.layer_calls.back().lanes) return;
  const Tensor g1 = view(buffers.g1, all);
  if (config.lane_output == "attn") {
    fill({.to = g1}, options.stream);
  } else if (config.lane_output == "mlp") {
    copy({.from = g0, .to = g1}, options.stream);
    fill({.to = g0}, options.stream);
  } else {
    axpby({.x = g0, .y = g0, .alpha = 0.5, .beta = 0}, options.stream);
    copy({.from = g0, .to = g1}, options.stream);
  }
}

void Gpt::Impl::head_logits(const detail::CallContext& call, const GptWeights& weights, const Tensor& rows,
                            const Tensor& logits) {
  const int64_t N = rows.numel();
  INGOT_CHECK(logits.rows() == N && logits.cols() == config.vocab, "gpt: found logits of shape ", logits.shape,
              ", expected (", N, ", ", config.vocab, ")");
  INGOT_CHECK(rows.device.kind == Device::cpu, "gpt: found rows on ", rows.device, ", expected them in host memory");
  const Tensor x = stream_out(call.tokens);
  const Tensor f = view(buffers.head_normed, {call.tokens, config.dim});
  const int32_t* row = rows.ptr<int32_t>();
  rmsnorm({.x = x, .w = get(weights, final_norm), .y = f, .eps = config.norm_eps}, options.stream);
  const Tensor w = get(weights, head != nullptr ? head : table);
  const auto product = [&](const Tensor& in, const Tensor& matrix, const Tensor& out, bool add) {
    const Tensor& workspace = buffers.linear_workspace;
    if (out.dtype == in.dtype)
      linear({.x = in, .w = matrix, .y = out, .accumulate = add, .products = options.products, .workspace = workspace},
             options.stream);
    else
      matmul({.a = in, .b = matrix, .c = out, .transpose_b = true, .beta = add ? 1.0 : 0.0, .workspace = workspace},
             options.stream);
  };
  for (int64_t i = 0; i < N; ++i) {
    INGOT_CHECK(row[i] >= 0 && row[i] < call.tokens, "gpt: found row ", row[i], ", expected 0 to ", call.tokens - 1);
    const Tensor fi = f.slice(0, row[i], row[i] + 1), li = logits.slice(0, i, i + 1);
    Tensor in = fi;
    if (head_proj != nullptr) {
      in = view(buffers.head_in, {1, config.embed_dim});
      product(fi, get(weights, head_proj), in, false);
    }
    product(in, w, li, false);
    if (call.adapters != nullptr && call.adapters->head.a) {
      int64_t s = 0;
      while (call.cu[size_t(s) + 1] <= row[i]) ++s;
      const Tensor low = view(buffers.head_low, {1, call.adapters->head.a.size(1)});
      product(fi, call.adapters->head.a.row(s), low, false);
      product(low, call.adapters->head.b.row(s), li, true);
    }
  }
  if (config.softcap > 0) softcap({.x = logits, .y = logits, .cap = config.softcap}, options.stream);
}

// The last layer call need not compute the outputs of tokens without a score.
void Gpt::Impl::cut(detail::CallContext& call, const TokenBatch& batch) {
  const int64_t N = call.scored();
  if (!buffers.scored_rows.merged || N == 0 || N == call.tokens) return;
  scored_at.clear();
  const int32_t* const at = batch.positions_on_host().ptr<int32_t>();
  for (size_t s = 0; s + 1 < call.cu.size(); ++s) {
    const int32_t end = call.cu[s + 1];
    scored_at.insert(scored_at.end(), at + end - (call.scored_cu[s + 1] - call.scored_cu[s]), at + end);
  }
  scored_at.insert(scored_at.end(), call.scored_cu.begin(), call.scored_cu.end());
  const int64_t all = int64_t(scored_at.size());
  Tensor there(scored_at.data(), {all});
  if (options.device.kind == Device::cuda) {
    const Tensor host = there;
    if (scored_at_memory.capacity() < host.bytes())
      scored_at_memory = Arena(2 * host.bytes(), gpu::memory_of(options.device));
    there = scored_at_memory.at(0, DType::i32, {all});
    copy({.from = host, .to = there}, options.stream);
  }
  call.cut = true;
  call.scored_positions = there.slice(0, 0, N), call.scored_cu_seqlens = there.slice(0, N, all);
}

void Gpt::Impl::check_cached(const TokenBatch& batch, const CachedSegments& cached) const {
  const std::span<const int32_t> cu = batch.cu();
  const std::vector<int64_t>& sequences = cached.sequences;
  INGOT_CHECK_EQ(cached.cache.device(), options.device, "gpt: device of the cache");
  INGOT_CHECK(sequences.size() < cu.size(), "gpt: found ", sequences.size(), " cached sequences for ", cu.size() - 1,
              " segments");
  INGOT_CHECK_EQ(cu[sequences.size()], cu.back(), "gpt: one cached sequence per segment");  // except for empty segments
  for (size_t s = 0; s < sequences.size(); ++s) {
    INGOT_CHECK(sequences[s] >= 0 && sequences[s] < cached.cache.sequences(), "gpt: found cached sequence ",
                sequences[s], ", expected 0 to ", cached.cache.sequences() - 1);
    for (size_t r = 0; r < s; ++r)
      INGOT_CHECK(sequences[r] != sequences[s], "gpt: cached sequence ", sequences[s], " appears twice");
    const int64_t length = cached.cache.length(sequences[s]), added = cu[s + 1] - cu[s];
    INGOT_CHECK_LE(length + added, cached.cache.capacity(), "gpt: tokens of cached sequence ", sequences[s]);
    if (options.training)
      INGOT_CHECK_LE(detail::cached_keys(cached, s, added), options.most_keys, "gpt: keys of cached sequence ",
                     sequences[s], ", expected at most the most_keys of the options");
    for (int64_t t = 0; t < added; ++t)
      INGOT_CHECK_EQ(int64_t(batch.positions_on_host().ptr<int32_t>()[cu[s] + t]), length + t,
                     "gpt: position that continues sequence ", sequences[s]);
  }
}

// The additional data of a call with cached sequences, and the update of the cache's lengths after the call.
void Gpt::Impl::go_on(detail::CallContext& call, const CachedSegments* cached) {
  if (cached == nullptr) return;
  call.cached = cached;
  call.cached_cu = cached_offsets(call.cu, *cached);
}
void Gpt::Impl::advance(const detail::CallContext& call) {
  if (call.cached == nullptr) return;
  for (size_t s = 0; s < call.cached->sequences.size(); ++s)
    call.cached->cache.advance(call.cached->sequences[s], call.cu[s + 1] - call.cu[s]);
}

// The offsets of each segment's keys, including cached keys, on the device for attention.
Tensor Gpt::Impl::cached_offsets(std::span<const int32_t> cu, const CachedSegments& cached) {
  cached_cu.clear();
  for (size_t s = 0; s < cached.sequences.size(); ++s) {
    const int32_t added = cu[s + 1] - cu[s];
    for (int32_t n : {0, added, 0, int32_t(detail::cached_keys(cached, s, added))}) cached_cu.push_back(n);
  }
  const Shape shape{int64_t(cached.sequences.size()), 2, 2};
  const Tensor host(cached_cu.data(), shape);
  if (options.device.kind == Device::cpu) return host;
  if (cached_cu_memory.capacity() < host.bytes())
    cached_cu_memory = Arena(2 * host.bytes(), gpu::memory_of(options.device));
  const Tensor there = cached_cu_memory.at(0, DType::i32, shape);
  // The host's memory is not pinned, so the call returns only when the memory may be used again.
  copy({.from = host, .to = there}, options.stream);
  return there;
}

// --- the public class

GptTypes gpt_types(Device device) {
  return device.kind == Device::cpu ? GptTypes(DType::f32) : GptTypes(DType::f32, DType::bf16, DType::bf16);
}

int64_t Gpt::planned_bytes(const GptConfig& config, const GptTypes& types, const GptOptions& options) {
  return detail::planned_bytes(config, layer_program(config, options.looping), types, options);
}
Gpt::Gpt(const GptConfig& config, const GptTypes& types, const GptOptions& options)
    : impl_(std::make_unique<Impl>(config, types, options)) {}
Gpt::~Gpt() = default;
Gpt::Gpt(Gpt&&) noexcept = default;
const GptConfig& Gpt::config() const { return impl_->config; }
const LayerProgram& Gpt::program() const { return impl_->program; }
const GptOptions& Gpt::options() const { return impl_->options; }
int64_t Gpt::arena_bytes() const { return impl_->buffers.arena.capacity(); }

void Gpt::losses(const GptWeights& weights, const TokenBatch& batch, const Tensor& loss, const GptAdapters* adapters,
                 MatrixInputs* inputs, const CachedSegments* cached) {
  Impl& m = *impl_;
  m.check_call(weights, batch, true);
  m.check_adapters(batch, adapters);
  if (cached != nullptr) m.check_cached(batch, *cached);
  if (batch.tokens.numel() == 0) return;
  detail::CallContext call = m.context(batch, adapters, nullptr);
  call.inputs = inputs;
  if (inputs == nullptr && cached == nullptr) m.cut(call, batch);
  m.go_on(call, cached);
  m.embed_forward(weights, batch, inputs);
  m.blocks_forward(call, weights);
  m.head_losses(call, weights, batch, {}, loss, {}, false);
  m.advance(call);
}

void Gpt::losses_and_gradients(const GptWeights& weights, const TokenBatch& batch, const Tensor& dloss,
                               const Tensor& loss, const Tensor& grads, const GptAdapters* adapters,
                               GptAdapters* adapter_grads, const CachedSegments* cached) {
  Impl& m = *impl_;
  INGOT_CHECK(m.options.training, "gpt: gradients were asked for, expected training = true in the options");
  m.check_call(weights, batch, true);
  m.check_adapters(batch, adapters);
  if (grads) INGOT_CHECK_EQ(grads.numel(), m.layout.padded_count(), "gpt: length of the flat gradients");
  if (cached != nullptr) m.check_cached(batch, *cached);
  if (batch.tokens.numel() == 0) return;
  detail::CallContext call = m.context(batch, adapters, adapter_grads);
  if (!grads && cached == nullptr) m.cut(call, batch);
  call.folds_scales = !m.buffers.scaled_of.empty() && !call.cut;
  m.go_on(call, cached);
  m.embed_forward(weights, batch);
  m.blocks_forward(call, weights);
  m.head_losses(call, weights, batch, dloss, loss, grads, true);
  m.blocks_backward(call, weights, grads);
  m.embed_backward(weights, batch, grads);
  m.advance(call);
}

void Gpt::logits(const GptWeights& weights, const TokenBatch& batch, const Tensor& rows, const Tensor& logits,
                 const GptAdapters* adapters) {
  Impl& m = *impl_;
  m.check_call(weights, batch, false);
  m.check_adapters(batch, adapters);
  if (rows.numel() == 0) return;
  const detail::CallContext call = m.context(batch, adapters, nullptr);
  m.embed_forward(weights, batch);
  m.blocks_forward(call, weights);
  m.head_logits(call, weights, rows, logits);
}

void Gpt::extend(const GptWeights& weights, const TokenBatch& batch, const std::vector<int64_t>& sequences,
                 GptCache& cache, const Tensor& rows, const Tensor& logits, const GptAdapters* adapters) {
  Impl& m = *impl_;
  m.check_call(weights, batch, false);
  m.check_adapters(batch, adapters);
  const CachedSegments cached{cache, sequences};
  m.check_cached(batch, cached);
  if (batch.tokens.numel() == 0) return;
  detail::CallContext call = m.context(batch, adapters, nullptr);
  m.go_on(call, &cached);
  m.embed_forward(weights, batch);
  m.blocks_forward(call, weights);
  m.advance(call);
  if (rows.numel() > 0) m.head_logits(call, weights, rows, logits);
}

void Gpt::next(const GptWeights& weights, const TokenBatch& batch, int64_t sequence, GptCache& cache,
               const Tensor& cached_cu, const Tensor& logits, const GptAdapters* adapters) {
  Impl& m = *impl_;
  const std::vector<int64_t> sequences{sequence};
  detail::CallContext call = m.context(batch, adapters, nullptr);
  const CachedSegments cached{cache, sequences};
  call.cached = &cached;
  call.cached_cu = cached_cu;
  call.cache_at = batch.positions;
  m.embed_forward(weights, batch);
  m.blocks_forward(call, weights);
  int32_t row = 0;
  m.head_logits(call, weights, Tensor(&row, {1}), logits);
}

}  // namespace ingot
