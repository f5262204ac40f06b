#include "ingot/models/gpt_oss/gpt_oss.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/moe/moe.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"

namespace ingot {

// --- memory of one batch -----------------------------------------------------------------------------------------
namespace {

// All (T, ...) f32 but for the ids. `take` gives each its place, or only counts it.
struct Buffers {
  Tensor x, normed, branch;       // (T, C): the residual stream, a norm's output, a branch's output
  Tensor qkv, mixed;              // (T, Q + 2 KV), (T, Q)
  Tensor router, chosen, weight;  // (T, E), (T, k) i32, (T, k)
  Tensor workspace;               // of the experts
  Tensor cos, sin;                // (positions, D / 2)

  template <class Take> Buffers(const GptOssConfig& c, int64_t T, int64_t positions, Take&& take) {
    for (Tensor* t : {&x, &normed, &branch}) *t = take(DType::f32, Shape{T, c.hidden});
    qkv = take(DType::f32, Shape{T, c.qkv_width()});
    mixed = take(DType::f32, Shape{T, c.q_width()});
    router = take(DType::f32, Shape{T, c.experts});
    chosen = take(DType::i32, Shape{T, c.experts_per_token});
    weight = take(DType::f32, Shape{T, c.experts_per_token});
    workspace = take(DType::u8, Shape{experts_workspace_bytes(T, c.experts_per_token, c.experts, c.hidden,
                                                              c.intermediate, DType::f32, {})});
    for (Tensor* t : {&cos, &sin}) *t = take(DType::f32, Shape{positions, c.head_dim / 2});
  }
};

int64_t positions_of(const GptOssConfig& c, const GptOssOptions& o) {
  return o.positions > 0 ? o.positions : c.context;
}

// The first n tokens' rows of a buffer made for more.
Tensor head_rows(const Tensor& t, int64_t n) { return t.slice(0, 0, n); }

}  // namespace

int64_t GptOss::workspace_bytes(const GptOssConfig& config, const GptOssOptions& options) {
  int64_t total = 0;
  const Buffers counted(config, options.batch, positions_of(config, options), [&](DType dtype, Shape shape) {
    total += Arena::aligned(dtype, shape);
    return Tensor(nullptr, dtype, shape);
  });
  return total;
}

struct GptOss::Impl {
  GptOssConfig c;
  const GptOssWeights& w;
  GptOssOptions options;
  Arena arena;
  Buffers all;
  std::vector<int32_t> positions;

  Impl(const GptOssConfig& config, const GptOssWeights& weights, const GptOssOptions& o)
      : c(config),
        w(weights),
        options(o),
        arena(workspace_bytes(config, o)),
        all(config, o.batch, positions_of(config, o),
            [&](DType dtype, Shape shape) { return arena.take(dtype, shape); }),
        positions(size_t(o.batch)) {
    rope_table(rope_frequencies(c.head_dim, c.rope_base, c.rope_scaling), all.cos, all.sin);
  }

  // One batch: tokens `begin` to `begin + T` of the sequence.
  struct Batch {
    int64_t begin, T;
    Tensor x, normed, branch, qkv, mixed, router, chosen, weight, positions;
    Tensor q, k, v;  // (T, heads, D) views of qkv
  };
  Batch batch_of(int64_t begin, int64_t T) {
    Batch b{begin, T};
    b.x = head_rows(all.x, T), b.normed = head_rows(all.normed, T), b.branch = head_rows(all.branch, T);
    b.qkv = head_rows(all.qkv, T), b.mixed = head_rows(all.mixed, T), b.router = head_rows(all.router, T);
    b.chosen = head_rows(all.chosen, T), b.weight = head_rows(all.weight, T);
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
  }

  // normed = norm(x), after x += branch where there is one already.
  void norm(const Batch& b, const Tensor& weight, bool add_branch) {
    if (add_branch)
      rmsnorm({.x = b.branch, .w = weight, .residual = b.x, .sum = b.x, .y = b.normed, .eps = c.norm_eps}, {});
    else
      rmsnorm({.x = b.x, .w = weight, .y = b.normed, .eps = c.norm_eps}, {});
  }

  // Rotates the new keys into the cache and copies the new values; a ring may take them in two parts.
  void store(const Batch& b, const Tensor& keys, const Tensor& values) {
    const int64_t rows = keys.size(0);
    for (int64_t t = 0; t < b.T;) {
      const int64_t row = (b.begin + t) % rows, n = std::min(b.T - t, rows - row);
      rope({.x = b.k.slice(0, t, t + n),
            .y = keys.slice(0, row, row + n),
            .positions = b.positions.slice(0, t, t + n),
            .cos = all.cos,
            .sin = all.sin},
           {});
      copy(b.v.slice(0, t, t + n), values.slice(0, row, row + n));
      t += n;
    }
  }

  void attend(const Batch& b, int64_t layer, GptOssCache& cache) {
    const bool sliding = c.sliding[size_t(layer)];
    const Tensor &keys = cache.keys(layer), &values = cache.values(layer);
    rope({.x = b.q, .y = b.q, .positions = b.positions, .cos = all.cos, .sin = all.sin}, {});
    store(b, keys, values);
    const int64_t rows = keys.size(0), end = b.begin + b.T;
    const int64_t visible = sliding ? std::min(end, c.window - 1 + b.T) : end;
    int32_t cu_q[2] = {0, int32_t(b.T)}, cu_k[2] = {0, int32_t(visible)}, first[1] = {int32_t((end - visible) % rows)};
    attention({.q = b.q,
               .k = keys,
               .v = values,
               .cu_q = Tensor(cu_q, {2}),
               .cu_k = Tensor(cu_k, {2}),
               .sinks = w.layers[size_t(layer)].sinks,
               .out = b.mixed.split_last(c.heads),
               .scale = 1 / std::sqrt(double(c.head_dim)),
               .window = sliding ? c.window : 0,
               .ring = sliding ? rows : 0,
               .k_first = sliding ? Tensor(first, {1}) : Tensor()},
              {});
  }

  void run_layer(const Batch& b, int64_t layer, GptOssCache& cache) {
    const GptOssLayer& l = w.layers[size_t(layer)];
    norm(b, l.attn_norm, layer > 0);
    stored_linear({.x = b.normed, .w = l.qkv, .b = l.b_qkv, .y = b.qkv}, {});
    attend(b, layer, cache);
    stored_linear({.x = b.mixed, .w = l.o, .b = l.b_o, .y = b.branch}, {});
    norm(b, l.mlp_norm, true);
    stored_linear({.x = b.normed, .w = l.router, .b = l.b_router, .y = b.router}, {});
    route({.logits = b.router, .experts = b.chosen, .weights = b.weight}, {});
    experts({.x = b.normed,
             .experts = b.chosen,
             .weights = b.weight,
             .gate_up = l.gate_up,
             .b_gate_up = l.b_gate_up,
             .down = l.down,
             .b_down = l.b_down,
             .y = b.branch,
             .workspace = all.workspace,
             .options = {.limit = c.swiglu_limit, .alpha = c.swiglu_alpha, .up_offset = 1},
             .e4m3_inputs = c.e4m3_inputs},
            {});
  }
};

GptOss::GptOss(const GptOssConfig& config, const GptOssWeights& weights, const GptOssOptions& options)
    : impl_(std::make_unique<Impl>(config, weights, options)) {}
GptOss::~GptOss() = default;
GptOss::GptOss(GptOss&&) noexcept = default;

const GptOssConfig& GptOss::config() const { return impl_->c; }
int64_t GptOss::layers() const { return int64_t(impl_->w.layers.size()); }
int64_t GptOss::batch() const { return impl_->options.batch; }

Tensor GptOss::extend(std::span<const int32_t> ids, GptOssCache& cache) {
  Impl& m = *impl_;
  const int64_t T = int64_t(ids.size()), begin = cache.length();
  INGOT_CHECK(1 <= T && T <= std::min(m.options.batch, cache.batch()), "gpt-oss: found a batch of ", T,
              " tokens, expected 1 to ", std::min(m.options.batch, cache.batch()));
  const int64_t room = std::min(cache.capacity(), positions_of(m.c, m.options));
  INGOT_CHECK(begin + T <= room, "gpt-oss: found ", begin + T, " tokens, expected at most ", room,
              ", the context that was made room for");
  for (int64_t t = 0; t < T; ++t)
    INGOT_CHECK(ids[size_t(t)] >= 0 && ids[size_t(t)] < m.c.vocab, "gpt-oss: found id ", ids[size_t(t)],
                " at position ", begin + t, ", expected 0 to ", m.c.vocab - 1);
  const Impl::Batch b = m.batch_of(begin, T);
  m.embed(b, ids);
  for (int64_t l = 0; l < layers(); ++l) m.run_layer(b, l, cache);
  m.norm(b, m.w.norm, layers() > 0);
  cache.advance(T);
  return b.normed;
}

void GptOss::logits(const Tensor& normed, const Tensor& logits) {
  stored_linear({.x = normed, .w = impl_->w.head, .y = logits}, {});
}

}  // namespace ingot
