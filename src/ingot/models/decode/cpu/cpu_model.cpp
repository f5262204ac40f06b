#include "ingot/models/decode/cpu/cpu_model.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/moe/moe.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/softcap/softcap.h"

namespace ingot::decode {

// --- memory of a batch -----------------------------------------------------------------------------------------
namespace {

// All (T, ...) f32, except for the ids. `take` places each buffer, or only counts its bytes.
struct Buffers {
  Tensor x, normed, branch;       // (T, C): the residual stream, a norm's output, a branch's output
  Tensor qkv, mixed;              // (T, Q + 2 KV), (T, Q)
  Tensor router, chosen, weight;  // (T, E), (T, k) i32, (T, k): with experts
  Tensor workspace;               // of the experts
  Tensor gate_up, hidden;         // (T, 2I), (T, I): with a dense MLP
  std::vector<Tensor> cos, sin;   // (positions, rotated dimensions / 2), by RoPE table

  template <class Take> Buffers(const DecoderSpec& c, int64_t T, int64_t positions, Take&& take) {
    const auto any = [&](bool experts) {
      return std::any_of(c.layer.begin(), c.layer.end(), [&](const LayerSpec& l) { return l.experts == experts; });
    };
    for (Tensor* t : {&x, &normed, &branch}) *t = take(DType::f32, Shape{T, c.hidden});
    qkv = take(DType::f32, Shape{T, c.qkv_width()});
    mixed = take(DType::f32, Shape{T, c.q_width()});
    if (any(true)) {
      router = take(DType::f32, Shape{T, c.experts});
      chosen = take(DType::i32, Shape{T, c.experts_per_token});
      weight = take(DType::f32, Shape{T, c.experts_per_token});
      workspace = take(DType::u8, Shape{experts_workspace_bytes(T, c.experts_per_token, c.experts, c.hidden,
                                                                c.intermediate, DType::f32, {})});
    }
    if (any(false)) {
      gate_up = take(DType::f32, Shape{T, 2 * c.intermediate});
      hidden = take(DType::f32, Shape{T, c.intermediate});
    }
    for (const RopeTable& table : c.rope)
      for (std::vector<Tensor>* t : {&cos, &sin})
        t->push_back(take(DType::f32, Shape{positions, rotated(c, table) / 2}));
  }
  static int64_t rotated(const DecoderSpec& c, const RopeTable& table) {
    return table.dim > 0 ? table.dim : c.head_dim;
  }
};

int64_t positions_of(const DecoderSpec& c, const CpuModelOptions& o) {
  return o.positions > 0 ? o.positions : c.context;
}

// The first n tokens' rows of a buffer made for more.
Tensor first_rows(const Tensor& t, int64_t n) { return t ? t.slice(0, 0, n) : t; }

// Returns the model's spec if the CPU path computes all its fields, else throws.
const DecoderSpec& supported(const DecoderSpec& spec) {
  check(spec, "decode");
  if (const std::string reason = unsupported_reason(spec, DecodePath::cpu); !reason.empty())
    fail(ErrorCode::unsupported, "decode: ", reason);
  return spec;
}

}  // namespace

int64_t CpuModel::workspace_bytes(const DecoderSpec& spec, const CpuModelOptions& options) {
  int64_t total = 0;
  const Buffers counted(spec, options.batch, positions_of(spec, options), [&](DType dtype, Shape shape) {
    total += Arena::aligned(dtype, shape);
    return Tensor(nullptr, dtype, shape);
  });
  return total;
}

struct CpuModel::Impl {
  DecoderSpec c;
  const DecoderWeights& w;
  CpuModelOptions options;
  Arena arena;
  Buffers all;
  std::vector<int32_t> positions;

  Impl(const DecoderSpec& spec, const DecoderWeights& weights, const CpuModelOptions& o)
      : c(supported(spec)),
        w(weights),
        options(o),
        arena(workspace_bytes(spec, o)),
        all(spec, o.batch, positions_of(spec, o), [&](DType dtype, Shape shape) { return arena.take(dtype, shape); }),
        positions(size_t(o.batch)) {
    for (size_t i = 0; i < c.rope.size(); ++i) rope_table(frequencies_of(c, c.rope[i]), all.cos[i], all.sin[i]);
  }

  // A batch: tokens `begin` to `begin + T` of the sequence.
  struct Batch {
    int64_t begin, T;
    bool row_by_row;  // attention is computed for one query at a time
    Tensor x, normed, branch, qkv, mixed, router, chosen, weight, gate_up, hidden, positions;
    Tensor q, k, v;  // (T, heads, D) views of qkv
  };
  Batch batch_of(int64_t begin, int64_t T, bool row_by_row) {
    Batch b{begin, T, row_by_row};
    b.x = first_rows(all.x, T), b.normed = first_rows(all.normed, T), b.branch = first_rows(all.branch, T);
    b.qkv = first_rows(all.qkv, T), b.mixed = first_rows(all.mixed, T), b.router = first_rows(all.router, T);
    b.chosen = first_rows(all.chosen, T), b.weight = first_rows(all.weight, T);
    b.gate_up = first_rows(all.gate_up, T), b.hidden = first_rows(all.hidden, T);
    std::iota(positions.begin(), positions.begin() + T, int32_t(begin));
    b.positions = Tensor(positions.data(), {T});
    b.q = b.qkv.slice(1, 0, c.q_width()).split_last(c.heads);
    b.k = b.qkv.slice(1, c.q_width(), c.q_width() + c.kv_width()).split_last(c.kv_heads);
    b.v = b.qkv.slice(1, c.q_width() + c.kv_width(), c.qkv_width()).split_last(c.kv_heads);
    return b;
  }

  void embed(const Batch& b, std::span<const int32_t> ids) {
    for (int64_t t = 0; t < b.T; ++t)
      dequantise(w.embed.row_range(ids[size_t(t)], ids[size_t(t)] + 1), b.x.slice(0, t, t + 1), {});
    if (c.embedding_scale == 1) return;
    float* const x = b.x.ptr<float>();
    for (int64_t i = 0; i < b.T * c.hidden; ++i) x[i] *= float(c.embedding_scale);
  }

  // y = norm(x), in place if y is empty.
  void normalise(const Tensor& x, const Tensor& weight, const Tensor& y) {
    rmsnorm({.x = x, .w = weight, .y = y, .eps = c.norm.eps, .unit_offset = c.norm.unit_offset}, {});
  }
  // normed = norm(x), after x += branch if add_branch is set.
  void norm(const Batch& b, const Tensor& weight, bool add_branch) {
    if (!add_branch) return normalise(b.x, weight, b.normed);
    rmsnorm({.x = b.branch,
             .w = weight,
             .residual = b.x,
             .sum = b.x,
             .y = b.normed,
             .eps = c.norm.eps,
             .unit_offset = c.norm.unit_offset},
            {});
  }

  // Rotates x, or copies x where the layer does not rotate.
  void rotate(int table, const Tensor& x, const Tensor& y, const Tensor& at) {
    if (table < 0) {
      if (x.data != y.data) copy({.from = x, .to = y}, {});
      return;
    }
    rope({.x = x,
          .y = y,
          .positions = at,
          .cos = all.cos[size_t(table)],
          .sin = all.sin[size_t(table)],
          .interleaved = c.rope[size_t(table)].interleaved},
         {});
  }
  // Rotates the new keys into the cache and copies the new values; a ring may take the rows in two parts.
  void store(const Batch& b, int table, const Tensor& keys, const Tensor& values) {
    const int64_t rows = keys.size(0);
    for (int64_t t = 0; t < b.T;) {
      const int64_t row = (b.begin + t) % rows, n = std::min(b.T - t, rows - row);
      rotate(table, b.k.slice(0, t, t + n), keys.slice(0, row, row + n), b.positions.slice(0, t, t + n));
      copy({.from = b.v.slice(0, t, t + n), .to = values.slice(0, row, row + n)}, {});
      t += n;
    }
  }

  void attend(const Batch& b, int64_t layer, KeyValueCache& cache) {
    const DecoderLayer& l = w.layers[size_t(layer)];
    const auto& [window, table, experts] = c.layer[size_t(layer)];
    const Tensor &keys = cache.keys(layer), &values = cache.values(layer);
    if (c.qk_norm) normalise(b.q, l.q_norm, b.q), normalise(b.k, l.k_norm, b.k);
    rotate(table, b.q, b.q, b.positions);
    store(b, table, keys, values);
    const int64_t step = b.row_by_row ? 1 : b.T;
    for (int64_t t = 0; t < b.T; t += step)
      attend_rows(l, window, b.begin + t, b.q.slice(0, t, t + step), keys, values, b.mixed.slice(0, t, t + step));
  }
  // Attention of queries from position `begin` on, whose keys have been stored.
  void attend_rows(const DecoderLayer& l, int64_t window, int64_t begin, const Tensor& q, const Tensor& keys,
                   const Tensor& values, const Tensor& mixed) {
    const int64_t T = q.size(0), rows = keys.size(0), end = begin + T;
    const int64_t visible = window > 0 ? std::min(end, window - 1 + T) : end;
    int32_t cu_q[2] = {0, int32_t(T)}, cu_k[2] = {0, int32_t(visible)}, first[1] = {int32_t((end - visible) % rows)};
    attention({.q = q,
               .k = keys,
               .v = values,
               .cu_q = Tensor(cu_q, {2}),
               .cu_k = Tensor(cu_k, {2}),
               .sinks = l.sinks,
               .out = mixed.split_last(c.heads),
               .scale = c.scale_of_attention(),
               .softcap = c.attention_softcap,
               .window = window,
               .ring = window > 0 ? rows : 0,
               .k_first = window > 0 ? Tensor(first, {1}) : Tensor()},
              {});
  }

  void dense_mlp(const Batch& b, const DecoderLayer& l) {
    GateOptions gate = c.gate;
    gate.interleaved = true;
    stored_linear({.x = b.normed, .w = l.gate_up, .b = l.b_gate_up, .y = b.gate_up}, {});
    swiglu_gate({.gate = b.gate_up, .h = b.hidden, .options = gate}, {});
    stored_linear({.x = b.hidden, .w = l.down, .b = l.b_down, .y = b.branch}, {});
  }
  void chosen_experts(const Batch& b, const DecoderLayer& l) {
    stored_linear({.x = b.normed, .w = l.router, .b = l.b_router, .y = b.router}, {});
    route({.logits = b.router, .experts = b.chosen, .weights = b.weight, .renormalise = c.renormalise}, {});
    experts({.x = b.normed,
             .experts = b.chosen,
             .weights = b.weight,
             .gate_up = l.gate_up,
             .b_gate_up = l.b_gate_up,
             .down = l.down,
             .b_down = l.b_down,
             .y = b.branch,
             .workspace = all.workspace,
             .options = c.gate,
             .e4m3_inputs = c.e4m3_inputs},
            {});
  }

  // Copies the residual stream at a boundary to `kept`, if `kept` asks for this boundary. Call after the next norm,
  // which adds the last branch to the stream.
  void keep(const Batch& b, int64_t boundary, const Boundaries* kept) {
    for (size_t i = 0; kept != nullptr && i < kept->layers.size(); ++i)
      if (kept->layers[i] == boundary)
        copy(
            {.from = b.x, .to = kept->rows.slice(0, 0, b.T).slice(1, int64_t(i) * c.hidden, int64_t(i + 1) * c.hidden)},
            {});
  }

  // Computes a layer. `normed` already holds the output of its first norm.
  void run_layer(const Batch& b, int64_t layer, KeyValueCache& cache) {
    const DecoderLayer& l = w.layers[size_t(layer)];
    stored_linear({.x = b.normed, .w = l.qkv, .b = l.b_qkv, .y = b.qkv}, {});
    attend(b, layer, cache);
    stored_linear({.x = b.mixed, .w = l.o, .b = l.b_o, .y = b.branch}, {});
    if (c.norm.post) normalise(b.branch, l.attn_post_norm, b.branch);
    norm(b, l.mlp_norm, true);
    if (c.layer[size_t(layer)].experts)
      chosen_experts(b, l);
    else
      dense_mlp(b, l);
    if (c.norm.post) normalise(b.branch, l.mlp_post_norm, b.branch);
  }
};

CpuModel::CpuModel(const DecoderSpec& spec, const DecoderWeights& weights, const CpuModelOptions& options)
    : impl_(std::make_unique<Impl>(spec, weights, options)) {}
CpuModel::~CpuModel() = default;
CpuModel::CpuModel(CpuModel&&) noexcept = default;

const DecoderSpec& CpuModel::spec() const { return impl_->c; }
int64_t CpuModel::layers() const { return int64_t(impl_->w.layers.size()); }
int64_t CpuModel::batch() const { return impl_->options.batch; }

Tensor CpuModel::extend_rows(std::span<const int32_t> ids, KeyValueCache& cache, const Boundaries* kept) {
  INGOT_CHECK_LE(int64_t(ids.size()), kStepRows, "decode: tokens of a step");
  return compute(ids, cache, true, kept);
}
Tensor CpuModel::extend(std::span<const int32_t> ids, KeyValueCache& cache, const Boundaries* kept) {
  return compute(ids, cache, false, kept);
}

Tensor CpuModel::compute(std::span<const int32_t> ids, KeyValueCache& cache, bool row_by_row, const Boundaries* kept) {
  Impl& m = *impl_;
  const int64_t T = int64_t(ids.size()), begin = cache.length();
  INGOT_CHECK(1 <= T && T <= std::min(m.options.batch, cache.batch()), "decode: found a batch of ", T,
              " tokens, expected 1 to ", std::min(m.options.batch, cache.batch()));
  const int64_t room = std::min(cache.capacity(), positions_of(m.c, m.options));
  INGOT_CHECK(begin + T <= room, "decode: found ", begin + T, " tokens, expected at most ", room,
              ", the context that was made room for");
  for (int64_t t = 0; t < T; ++t)
    INGOT_CHECK(ids[size_t(t)] >= 0 && ids[size_t(t)] < m.c.vocab, "decode: found id ", ids[size_t(t)], " at position ",
                begin + t, ", expected 0 to ", m.c.vocab - 1);
  const Impl::Batch b = m.batch_of(begin, T, row_by_row);
  m.embed(b, ids);
  for (int64_t l = 0; l < layers(); ++l) {
    m.norm(b, m.w.layers[size_t(l)].attn_norm, l > 0);
    m.keep(b, l, kept);
    m.run_layer(b, l, cache);
  }
  m.norm(b, m.w.norm, layers() > 0);
  m.keep(b, layers(), kept);
  cache.advance(T);
  return b.normed;
}

void CpuModel::logits(const Tensor& normed, const Tensor& logits) {
  stored_linear({.x = normed, .w = impl_->w.head, .y = logits}, {});
  if (impl_->c.logit_softcap > 0) softcap({.x = logits, .y = logits, .cap = impl_->c.logit_softcap}, {});
}

}  // namespace ingot::decode
