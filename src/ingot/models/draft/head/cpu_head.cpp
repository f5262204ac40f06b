#include "ingot/models/draft/head/cpu_head.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"
#include "ingot/kernels/rope/rope.h"
#include "ingot/kernels/swiglu/swiglu.h"

namespace ingot::draft {

// --- the cache -----------------------------------------------------------------------------------------------------

int64_t HeadCache::bytes(const HeadConfig& c, int64_t capacity) {
  return Arena::aligned(DType::f32, {capacity, c.hidden}) + 2 * Arena::aligned(DType::f32, {capacity, c.kv_width()});
}

HeadCache::HeadCache(const HeadConfig& c, int64_t capacity) : arena_(bytes(c, capacity)) {
  features_ = arena_.take(DType::f32, {capacity, c.hidden});
  for (Tensor* t : {&keys_, &values_}) *t = arena_.take(DType::f32, {capacity, c.kv_heads, c.head_dim});
}

void HeadCache::truncate(int64_t length) {
  INGOT_CHECK(length >= 0 && length <= this->length(), "draft head: found a length of ", length,
              " to go back to, expected 0 to ", this->length());
  rows_.truncate(length);
}

void HeadCache::copy_from(const HeadCache& from, int64_t length) {
  rows_.copy_from(from.rows_, length);
  const auto copy_rows = [](const Tensor& source, const Tensor& to, int64_t n) {
    if (n > 0) copy({.from = source.slice(0, 0, n), .to = to.slice(0, 0, n)}, {});
  };
  copy_rows(from.features_, features_, length);
  copy_rows(from.keys_, keys_, rows_.computed), copy_rows(from.values_, values_, rows_.computed);
}

// --- memory of a call ----------------------------------------------------------------------------------------------
namespace {

// All f32. `take` places each buffer, or only counts its bytes.
struct Buffers {
  Tensor hidden_states;   // (T, n C)
  Tensor inputs;          // (T, 2 C): the normalised embedding and the normalised features
  Tensor qkv;             // (T, Q + 2 KV); rows of a prompt use the part of keys and values
  Tensor x, normed, sum;  // (1, C): the features, a norm's output, the residual stream
  Tensor mixed;           // (1, Q)
  Tensor gate_up, mlp;    // (1, 2I), (1, I)
  Tensor branch;          // (1, C)
  Tensor logits;          // (1, D)
  Tensor cos, sin;        // (positions, head_dim / 2)

  template <class Take> Buffers(const HeadConfig& c, int64_t T, int64_t positions, Take&& take) {
    hidden_states = take(Shape{T, c.features()});
    inputs = take(Shape{T, 2 * c.hidden});
    qkv = take(Shape{T, c.q_width() + 2 * c.kv_width()});
    for (Tensor* t : {&x, &normed, &sum, &branch}) *t = take(Shape{1, c.hidden});
    mixed = take(Shape{1, c.q_width()});
    gate_up = take(Shape{1, 2 * c.intermediate});
    mlp = take(Shape{1, c.intermediate});
    logits = take(Shape{1, c.draft_vocab});
    for (Tensor* t : {&cos, &sin}) *t = take(Shape{positions, c.head_dim / 2});
  }
};

}  // namespace

int64_t CpuHead::workspace_bytes(const HeadConfig& config, int64_t batch, int64_t positions) {
  int64_t total = 0;
  const Buffers counted(config, batch, positions, [&](Shape shape) {
    total += Arena::aligned(DType::f32, shape);
    return Tensor(nullptr, DType::f32, shape);
  });
  return total;
}

// --- the head ------------------------------------------------------------------------------------------------------
struct CpuHead::Impl {
  const HeadConfig& c;
  const HeadWeights& w;
  WeightMatrix embed, head;
  int64_t batch;
  Arena arena;
  Buffers all;
  std::vector<int32_t> positions;

  Impl(const DraftHead& h, const DecoderWeights& target, int64_t most, int64_t context)
      : c(h.config),
        w(h.weights),
        embed(w.embed ? w.embed : target.embed),
        head(w.head ? w.head : target.head),
        batch(most),
        arena(workspace_bytes(c, most, context)),
        all(c, most, context, [&](Shape shape) { return arena.take(DType::f32, shape); }),
        positions(size_t(most)) {
    rope_table(rope_frequencies(c.head_dim, c.rope.theta, c.rope.scaling), all.cos, all.sin);
  }

  void norm(const Tensor& x, const Tensor& weight, const Tensor& y) {
    rmsnorm({.x = x, .w = weight, .y = y, .eps = c.norm_eps}, {});
  }

  // features = fc hidden_states, with the norms before the product.
  void project(int64_t T, const Tensor& features) {
    const Tensor states = all.hidden_states.slice(0, 0, T);
    if (c.norm_before_fc) norm(states, w.fc_norm, states);
    for (int64_t i = 0; c.fc_norm && i < int64_t(c.boundaries.size()); ++i) {
      const Tensor part = states.slice(1, i * c.hidden, (i + 1) * c.hidden);
      norm(part, w.fc_norm.slice(0, i * c.hidden, (i + 1) * c.hidden), part);
    }
    stored_linear({.x = states, .w = w.fc, .y = features}, {});
  }

  // The inputs of the products of queries, keys and values: T rows.
  Tensor inputs_of(std::span<const int32_t> tokens, const Tensor& features) {
    const int64_t T = int64_t(tokens.size());
    const Tensor inputs = all.inputs.slice(0, 0, T);
    const Tensor left = inputs.slice(1, 0, c.hidden), right = inputs.slice(1, c.hidden, 2 * c.hidden);
    for (int64_t t = 0; t < T; ++t) {
      dequantise(embed.row_range(tokens[size_t(t)], tokens[size_t(t)] + 1), all.branch, {});
      norm(all.branch, w.embed_norm, left.slice(0, t, t + 1));
    }
    norm(features, w.hidden_norm, right);
    return inputs;
  }

  // Rotates T rows from position `begin` on.
  void rotate(int64_t begin, const Tensor& x, const Tensor& y) {
    const int64_t T = x.size(0);
    std::iota(positions.begin(), positions.begin() + T, int32_t(begin));
    rope({.x = x, .y = y, .positions = Tensor(positions.data(), {T}), .cos = all.cos, .sin = all.sin}, {});
  }
  void store(int64_t begin, const Tensor& keys, const Tensor& values, const HeadCache& cache) {
    const int64_t end = begin + keys.size(0);
    rotate(begin, keys.split_last(c.kv_heads), cache.keys_.slice(0, begin, end));
    copy({.from = values.split_last(c.kv_heads), .to = cache.values_.slice(0, begin, end)}, {});
  }

  // Keys and values of rows `begin` to `begin` + T.
  void store_rows(int64_t begin, std::span<const int32_t> tokens, const HeadCache& cache) {
    const int64_t T = int64_t(tokens.size());
    const Tensor inputs = inputs_of(tokens, cache.features_.slice(0, begin, begin + T));
    const Tensor kv = Tensor(all.qkv.data, DType::f32, {T, 2 * c.kv_width()});
    stored_linear({.x = inputs, .w = w.qkv.row_range(c.q_width(), w.qkv.rows()), .y = kv}, {});
    store(begin, kv.slice(1, 0, c.kv_width()), kv.slice(1, c.kv_width(), 2 * c.kv_width()), cache);
  }

  void attend(int64_t row, const Tensor& q, const HeadCache& cache) {
    const int64_t first = c.window > 0 ? std::max<int64_t>(0, row + 1 - c.window) : 0;
    int32_t one[2] = {0, 1}, visible[2] = {0, int32_t(row + 1 - first)};
    attention({.q = q,
               .k = cache.keys_.slice(0, first, row + 1),
               .v = cache.values_.slice(0, first, row + 1),
               .cu_q = Tensor(one, {2}),
               .cu_k = Tensor(visible, {2}),
               .out = all.mixed.split_last(c.heads),
               .scale = 1 / std::sqrt(double(c.head_dim))},
              {});
  }

  // The layer of one row: sum = its output for a token and features (1, C), keys and values stored.
  void run_layer(int64_t row, int32_t token, const Tensor& features, const HeadCache& cache) {
    const Tensor inputs = inputs_of({&token, 1}, features), qkv = all.qkv.slice(0, 0, 1);
    stored_linear({.x = inputs, .w = w.qkv, .y = qkv}, {});
    const int64_t q_end = c.q_width(), k_end = q_end + c.kv_width();
    const Tensor q = qkv.slice(1, 0, q_end).split_last(c.heads);
    rotate(row, q, q);
    store(row, qkv.slice(1, q_end, k_end), qkv.slice(1, k_end, k_end + c.kv_width()), cache);
    attend(row, q, cache);
    stored_linear({.x = all.mixed, .w = w.o, .y = all.branch}, {});
    const Tensor residual = c.norm_before_residual ? inputs.slice(1, c.hidden, 2 * c.hidden) : features;
    rmsnorm(
        {.x = all.branch, .w = w.mlp_norm, .residual = residual, .sum = all.sum, .y = all.normed, .eps = c.norm_eps},
        {});
    stored_linear({.x = all.normed, .w = w.gate_up, .y = all.gate_up}, {});
    swiglu_gate({.gate = all.gate_up, .h = all.mlp, .options = {.interleaved = true}}, {});
    stored_linear({.x = all.mlp, .w = w.down, .y = all.branch}, {});
    rmsnorm({.x = all.branch, .w = w.norm, .residual = all.sum, .sum = all.sum, .y = all.normed, .eps = c.norm_eps},
            {});
  }
  // The likeliest token after run_layer(); among equals that with the lowest id of the head.
  int32_t likeliest() {
    stored_linear({.x = all.normed, .w = head, .y = all.logits}, {});
    const float* logits = all.logits.ptr<float>();
    const int64_t best = std::max_element(logits, logits + c.draft_vocab) - logits;
    return w.ids.empty() ? int32_t(best) : w.ids[size_t(best)];
  }
};

CpuHead::CpuHead(const DraftHead& head, const DecoderWeights& target, int64_t batch, int64_t positions)
    : impl_(std::make_unique<Impl>(head, target, batch, positions)) {}
CpuHead::~CpuHead() = default;

const HeadConfig& CpuHead::config() const { return impl_->c; }
const Tensor& CpuHead::hidden_states() const { return impl_->all.hidden_states; }
const Tensor& CpuHead::last_logits() const { return impl_->all.logits; }

void CpuHead::append(std::span<const int32_t> ids, HeadCache& cache) {
  const int64_t T = int64_t(ids.size()), begin = cache.length();
  INGOT_CHECK(T >= 1 && T <= impl_->batch && begin + T <= cache.features_.size(0), "draft head: found ", T,
              " tokens behind ", begin, ", expected at most ", impl_->batch, " and room for them");
  impl_->project(T, cache.features_.slice(0, begin, begin + T));
  cache.rows_.append(ids);
}

void CpuHead::compute_rows(HeadCache& cache) {
  HeadRows& rows = cache.rows_;
  while (rows.computed < cache.length() - 1) {
    const int64_t T = std::min(impl_->batch, cache.length() - 1 - rows.computed);
    impl_->store_rows(rows.computed, std::span(rows.ids).subspan(size_t(rows.computed + 1), size_t(T)), cache);
    rows.computed += T;
  }
}

std::vector<int32_t> CpuHead::draft(HeadCache& cache, int32_t next, int64_t count) {
  const int64_t n = cache.length();
  INGOT_CHECK(n >= 1 && count >= 1 && n + count <= cache.features_.size(0), "draft head: found a draft of ", count,
              " tokens behind ", n, ", expected at least 1 of each and room for them");
  compute_rows(cache);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t token = i == 0 ? next : ids.back();
    if (i > 0) copy({.from = impl_->c.norm_output ? impl_->all.normed : impl_->all.sum, .to = impl_->all.x}, {});
    impl_->run_layer(n - 1 + i, token, i == 0 ? cache.features_.slice(0, n - 1, n) : impl_->all.x, cache);
    ids.push_back(impl_->likeliest());
  }
  cache.rows_.computed = n;
  cache.rows_.after_last = next;
  return ids;
}

}  // namespace ingot::draft
