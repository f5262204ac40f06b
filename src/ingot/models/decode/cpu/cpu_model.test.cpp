// The CPU path against a plain definition in fp64, for every property that a spec may have.
#include "ingot/models/decode/cpu/cpu_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <numbers>

#include "ingot/testing/testing.h"

namespace ingot::decode {
namespace {

using Row = std::vector<double>;

// Random weights, f32 in rows, at a scale at which every part of the model matters.
struct RandomModel {
  DecoderSpec spec;
  DecoderWeights weights;

  explicit RandomModel(const DecoderSpec& s) : spec(s) {
    const int64_t C = s.hidden, I = s.intermediate;
    constexpr double around = 1;  // of the weights of norms
    weights.embed = matrix({s.vocab, C}, 1);
    weights.head = s.tied_embeddings ? weights.embed : matrix({s.vocab, C}, 1.5 / std::sqrt(double(C)));
    for (const LayerSpec& layer : s.layer) {
      DecoderLayer& y = weights.layers.emplace_back();
      const auto bank = [&](int64_t rows, int64_t cols) {
        return layer.experts ? Shape{s.experts, rows, cols} : Shape{rows, cols};
      };
      const auto biases = [&](int64_t n) { return layer.experts ? Shape{s.experts, n} : Shape{n}; };
      y.attn_norm = vector({C}, 0.3, around), y.mlp_norm = vector({C}, 0.3, around);
      y.qkv = matrix({s.qkv_width(), C}, 1.5 / std::sqrt(double(C)));
      y.o = matrix({C, s.q_width()}, 1 / std::sqrt(double(s.q_width())));
      y.gate_up = matrix(bank(2 * I, C), 1.5 / std::sqrt(double(C)));
      y.down = matrix(bank(C, I), 1 / std::sqrt(double(I)));
      if (layer.experts) y.router = matrix({s.experts, C}, 1.5 / std::sqrt(double(C)));
      if (s.qkv_bias) y.b_qkv = vector({s.qkv_width()}, 0.5);
      if (s.output_bias) y.b_o = vector({C}, 0.5);
      if (s.mlp_bias) y.b_gate_up = vector(biases(2 * I), 0.5), y.b_down = vector(biases(C), 0.5);
      if (s.mlp_bias && layer.experts) y.b_router = vector({s.experts}, 0.5);
      if (s.sinks) y.sinks = vector({s.heads}, 1);
      if (s.norm.post) y.attn_post_norm = vector({C}, 0.3, around), y.mlp_post_norm = vector({C}, 0.3, around);
      if (s.qk_norm) y.q_norm = vector({s.head_dim}, 0.3, around), y.k_norm = vector({s.head_dim}, 0.3, around);
    }
    weights.norm = vector({C}, 0.3, around);
  }

 private:
  Tensor vector(Shape shape, double scale, double mean = 0) {
    testing::Buffer& b = memory_.emplace_back(DType::f32, shape);
    testing::fill_normal(b, ++seed_, scale, mean);
    return b;
  }
  WeightMatrix matrix(Shape shape, double scale) { return WeightMatrix(vector(shape, scale)); }
  std::deque<testing::Buffer> memory_;
  uint64_t seed_ = 0;
};

// The definition, token by token.
class Definition {
 public:
  explicit Definition(const RandomModel& m)
      : s_(m.spec), w_(m.weights), keys_(m.weights.layers.size()), values_(keys_) {}

  Row logits(int32_t id) {
    Row x(size_t(s_.hidden));
    for (size_t c = 0; c < x.size(); ++c) x[c] = at(w_.embed.data, id * s_.hidden + int64_t(c)) * s_.embedding_scale;
    for (size_t l = 0; l < w_.layers.size(); ++l) {
      const DecoderLayer& y = w_.layers[l];
      add(x, posted(times(y.o, y.b_o, attend(l, norm(x, y.attn_norm))), y.attn_post_norm));
      add(x, posted(s_.layer[l].experts ? experts(y, norm(x, y.mlp_norm)) : mlp(y, norm(x, y.mlp_norm), 0),
                    y.mlp_post_norm));
    }
    ++position_;
    Row out = times(w_.head, {}, norm(x, w_.norm));
    if (s_.logit_softcap > 0)
      for (double& v : out) v = s_.logit_softcap * std::tanh(v / s_.logit_softcap);
    return out;
  }

 private:
  static double at(const Tensor& t, int64_t i) { return double(t.ptr<float>()[i]); }
  static void add(Row& x, const Row& y) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }
  Row posted(const Row& x, const Tensor& weight) const { return s_.norm.post ? norm(x, weight) : x; }
  Row norm(const Row& x, const Tensor& weight) const {
    double sum = 0;
    for (const double v : x) sum += v * v;
    const double rstd = 1 / std::sqrt(sum / double(x.size()) + s_.norm.eps);
    Row y(x.size());
    for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * rstd * (at(weight, int64_t(i)) + (s_.norm.unit_offset ? 1 : 0));
    return y;
  }
  static Row times(const WeightMatrix& m, const Tensor& bias, const Row& x, int64_t expert = 0) {
    const int64_t N = m.rows(), K = m.cols();
    Row y(size_t(N), 0.0);
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t k = 0; k < K; ++k) y[size_t(n)] += at(m.data, (expert * N + n) * K + k) * x[size_t(k)];
      if (bias) y[size_t(n)] += at(bias, expert * N + n);
    }
    return y;
  }

  double frequency(const RopeTable& t, int64_t j, int64_t dim) const {
    const double f = std::pow(t.theta, -2 * double(j) / double(dim));
    const RopeScaling& s = t.scaling;
    if (s.kind == RopeScaling::linear) return f / s.factor;
    if (s.kind == RopeScaling::yarn) return rope_frequencies(dim, t.theta, s).theta[size_t(j)];
    if (s.kind != RopeScaling::llama3) return f;
    const double wavelength = 2 * std::numbers::pi / f;
    if (wavelength < s.original_context / s.beta_fast) return f;
    if (wavelength > s.original_context / s.beta_slow) return f / s.factor;
    const double smooth = (s.original_context / wavelength - s.beta_slow) / (s.beta_fast - s.beta_slow);
    return (1 - smooth) * f / s.factor + smooth * f;
  }
  void rotate(Row& head, int table) const {
    if (table < 0) return;
    const RopeTable& t = s_.rope[size_t(table)];
    const int64_t dim = t.dim > 0 ? t.dim : s_.head_dim;
    const double amplitude =
        t.scaling.kind == RopeScaling::yarn ? rope_frequencies(dim, t.theta, t.scaling).amplitude : 1;
    for (int64_t j = 0; j < dim / 2; ++j) {
      double &a = head[size_t(t.interleaved ? 2 * j : j)], &b = head[size_t(t.interleaved ? 2 * j + 1 : j + dim / 2)];
      const double angle = double(position_) * frequency(t, j, dim);
      const double c = amplitude * std::cos(angle), s = amplitude * std::sin(angle), first = a;
      a = first * c - b * s, b = b * c + first * s;
    }
  }
  // Heads of a part of qkv, normalised and rotated where the spec says so.
  std::vector<Row> heads_of(const Row& qkv, int64_t begin, int64_t count, const Tensor& weight, int table) const {
    std::vector<Row> heads;
    for (int64_t h = 0; h < count; ++h) {
      const auto from = qkv.begin() + begin + h * s_.head_dim;
      Row head(from, from + s_.head_dim);
      if (s_.qk_norm) head = norm(head, weight);
      rotate(head, table);
      heads.push_back(head);
    }
    return heads;
  }
  Row attend(size_t l, const Row& x) {
    const DecoderLayer& y = w_.layers[l];
    const LayerSpec& layer = s_.layer[l];
    const Row qkv = times(y.qkv, y.b_qkv, x);
    const auto q = heads_of(qkv, 0, s_.heads, y.q_norm, layer.rope);
    keys_[l].push_back(heads_of(qkv, s_.q_width(), s_.kv_heads, y.k_norm, layer.rope));
    std::vector<Row>& v = values_[l].emplace_back();
    for (int64_t h = 0; h < s_.kv_heads; ++h) {
      const auto from = qkv.begin() + s_.q_width() + s_.kv_width() + h * s_.head_dim;
      v.emplace_back(from, from + s_.head_dim);
    }
    const int64_t first = layer.window > 0 ? std::max<int64_t>(0, position_ + 1 - layer.window) : 0;
    Row out;
    for (int64_t h = 0; h < s_.heads; ++h) {
      const int64_t of = h / (s_.heads / s_.kv_heads);
      Row scores;
      for (int64_t i = first; i <= position_; ++i) {
        double dot = 0;
        for (int64_t d = 0; d < s_.head_dim; ++d)
          dot += q[size_t(h)][size_t(d)] * keys_[l][size_t(i)][size_t(of)][size_t(d)];
        dot *= s_.attention_scale > 0 ? s_.attention_scale : 1 / std::sqrt(double(s_.head_dim));
        scores.push_back(s_.attention_softcap > 0 ? s_.attention_softcap * std::tanh(dot / s_.attention_softcap) : dot);
      }
      double sum = s_.sinks ? std::exp(at(y.sinks, h)) : 0;
      for (double& score : scores) sum += score = std::exp(score);
      for (int64_t d = 0; d < s_.head_dim; ++d) {
        double mixed = 0;
        for (size_t i = 0; i < scores.size(); ++i)
          mixed += scores[i] / sum * values_[l][size_t(first) + i][size_t(of)][size_t(d)];
        out.push_back(mixed);
      }
    }
    return out;
  }

  double gated(double gate, double up) const {
    const GateOptions& o = s_.gate;
    if (o.cubic != 0)
      return 0.5 * gate * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (gate + 0.044715 * gate * gate * gate))) *
             up;
    if (o.limit > 0) gate = std::min(gate, o.limit), up = std::clamp(up, -o.limit, o.limit);
    return gate / (1 + std::exp(-o.alpha * gate)) * (up + o.up_offset);
  }
  Row mlp(const DecoderLayer& y, const Row& x, int64_t expert) const {
    const Row both = times(y.gate_up, y.b_gate_up, x, expert);
    Row h;
    for (size_t j = 0; j < both.size(); j += 2) h.push_back(gated(both[j], both[j + 1]));
    return times(y.down, y.b_down, h, expert);
  }
  Row experts(const DecoderLayer& y, const Row& x) const {
    const Row logits = times(y.router, y.b_router, x);
    std::vector<size_t> order(logits.size());
    for (size_t e = 0; e < order.size(); ++e) order[e] = e;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
    double all = 0, chosen = 0;
    for (size_t i = 0; i < order.size(); ++i) {
      all += std::exp(logits[order[i]]);
      if (i < size_t(s_.experts_per_token)) chosen += std::exp(logits[order[i]]);
    }
    Row sum(x.size(), 0.0);
    for (int64_t i = 0; i < s_.experts_per_token; ++i) {
      const size_t e = order[size_t(i)];
      const Row out = mlp(y, x, int64_t(e));
      for (size_t c = 0; c < sum.size(); ++c) sum[c] += std::exp(logits[e]) / (s_.renormalise ? chosen : all) * out[c];
    }
    return sum;
  }

  const DecoderSpec& s_;
  const DecoderWeights& w_;
  int64_t position_ = 0;
  std::vector<std::vector<std::vector<Row>>> keys_, values_;  // by layer, token and head
};

std::vector<int32_t> some_ids(const DecoderSpec& s) {
  std::vector<int32_t> ids(23);
  testing::fill_ids(Tensor(ids.data(), {int64_t(ids.size())}), 99, s.vocab);
  return ids;
}
Row defined_logits(const RandomModel& m) {
  Definition d(m);
  Row all;
  for (const int32_t id : some_ids(m.spec)) {
    const Row row = d.logits(id);
    all.insert(all.end(), row.begin(), row.end());
  }
  return all;
}
// In batches of several sizes, the cache's ring shorter than the sequence.
Row computed_logits(const RandomModel& m) {
  const std::vector<int32_t> ids = some_ids(m.spec);
  CpuModel model(m.spec, m.weights, {.batch = 7, .positions = 32});
  KeyValueCache cache(m.spec, m.spec.layers, 32, 7);
  Row all;
  size_t first = 0;
  for (const size_t n : {5, 1, 7, 2, 1, 7}) {
    std::vector<float> rows(n * size_t(m.spec.vocab));
    const Tensor logits(rows.data(), {int64_t(n), m.spec.vocab});
    model.logits(model.extend(std::span(ids).subspan(first, n), cache), logits);
    all.insert(all.end(), rows.begin(), rows.end());
    first += n;
  }
  EXPECT_EQ(first, ids.size());
  return all;
}
double largest(const Row& a) {
  double most = 0;
  for (const double v : a) most = std::max(most, std::abs(v));
  return most;
}
double difference(const Row& a, const Row& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(a[i] - b[i]));
  return most;
}

// A dense model with SwiGLU, like Llama.
DecoderSpec dense_spec() {
  DecoderSpec s{.vocab = 41, .hidden = 24, .layers = 3, .heads = 4, .kv_heads = 2, .head_dim = 10, .intermediate = 36};
  s.layer.assign(3, {.experts = false});
  s.rope = {{.theta = 10000}};
  s.context = 64;
  return s;
}
DecoderSpec expert_spec() {
  DecoderSpec s = dense_spec();
  s.layer.assign(3, {});
  s.experts = 6, s.experts_per_token = 2;
  return s;
}

struct Change {
  const char* name;
  DecoderSpec (*base)();
  void (*change)(DecoderSpec& s);
};
// Each change has a single property.
const Change kChanges[] = {
    {"a window", dense_spec, [](DecoderSpec& s) { s.layer[0].window = 4, s.layer[2].window = 6; }},
    {"no rotation in a layer", dense_spec, [](DecoderSpec& s) { s.layer[1].rope = -1; }},
    {"several tables", dense_spec,
     [](DecoderSpec& s) {
       s.rope.push_back({.theta = 50});
       s.layer[1].rope = 1;
     }},
    {"interleaved pairs", dense_spec, [](DecoderSpec& s) { s.rope[0].interleaved = true; }},
    {"partial rotation", dense_spec, [](DecoderSpec& s) { s.rope[0].dim = 4; }},
    {"linear scaling", dense_spec,
     [](DecoderSpec& s) { s.rope[0].scaling = {.kind = RopeScaling::linear, .factor = 8}; }},
    {"llama3 scaling", dense_spec,
     [](DecoderSpec& s) {
       s.rope[0].theta = 50;
       s.rope[0].scaling = {.kind = RopeScaling::llama3, .factor = 8, .original_context = 30, .beta_fast = 4};
     }},
    {"yarn", dense_spec,
     [](DecoderSpec& s) { s.rope[0].scaling = {.kind = RopeScaling::yarn, .factor = 8, .original_context = 16}; }},
    {"norms times 1 + w", dense_spec, [](DecoderSpec& s) { s.norm.unit_offset = true; }},
    {"norms after branches", dense_spec, [](DecoderSpec& s) { s.norm.post = true; }},
    {"a larger eps", dense_spec, [](DecoderSpec& s) { s.norm.eps = 0.1; }},
    {"norms of queries and keys", dense_spec, [](DecoderSpec& s) { s.qk_norm = true; }},
    {"biases of q, k and v", dense_spec, [](DecoderSpec& s) { s.qkv_bias = true; }},
    {"a bias of the output", dense_spec, [](DecoderSpec& s) { s.output_bias = true; }},
    {"biases of the MLP", dense_spec, [](DecoderSpec& s) { s.mlp_bias = true; }},
    {"sinks", dense_spec, [](DecoderSpec& s) { s.sinks = true; }},
    {"a scale of attention", dense_spec, [](DecoderSpec& s) { s.attention_scale = 0.1; }},
    {"a softcap in attention", dense_spec, [](DecoderSpec& s) { s.attention_softcap = 2; }},
    {"a softcap of logits", dense_spec, [](DecoderSpec& s) { s.logit_softcap = 3; }},
    {"GeGLU", dense_spec, [](DecoderSpec& s) { s.gate = gelu_gate(); }},
    {"GPT-OSS's gate", dense_spec, [](DecoderSpec& s) { s.gate = clamped_gate(1.5, 1.702); }},
    {"a scale of embeddings", dense_spec, [](DecoderSpec& s) { s.embedding_scale = 4.5; }},
    {"a tied head", dense_spec, [](DecoderSpec& s) { s.tied_embeddings = true; }},
    {"experts", dense_spec, [](DecoderSpec& s) { s = expert_spec(); }},
    {"experts in one layer", expert_spec, [](DecoderSpec& s) { s.layer[1].experts = false; }},
    {"weights not renormalised", expert_spec, [](DecoderSpec& s) { s.renormalise = false; }},
    {"more experts of a token", expert_spec, [](DecoderSpec& s) { s.experts_per_token = 3; }},
    {"biases of experts and router", expert_spec, [](DecoderSpec& s) { s.mlp_bias = true; }},
};

// 23 tokens through three layers in fp32: some hundred roundings of 2^-24 each, of numbers a few times the logits'.
constexpr double kTolerance = 2e-5;

TEST(CpuModel, EveryPropertyOfASpecIsComputedAsItIsDefined) {
  for (const Change& c : kChanges) {
    SCOPED_TRACE(c.name);
    DecoderSpec s = c.base();
    c.change(s);
    const RandomModel m(s);
    const Row want = defined_logits(m);
    EXPECT_LT(difference(computed_logits(m), want), kTolerance * largest(want));
  }
}

TEST(CpuModel, APropertyChangesTheLogitsByMoreThanTheToleranceAllows) {
  for (const Change& c : kChanges) {
    SCOPED_TRACE(c.name);
    DecoderSpec s = c.base();
    const Row without = computed_logits(RandomModel(s));
    c.change(s);
    const Row with = computed_logits(RandomModel(s));
    EXPECT_GT(difference(with, without), 100 * kTolerance * largest(with));
  }
}

TEST(CpuModel, FamiliesThatJoinManyPropertiesAreComputedAsTheyAreDefined) {
  DecoderSpec gemma = dense_spec();
  gemma.norm = {.eps = 1e-6, .unit_offset = true, .post = true};
  gemma.qk_norm = gemma.tied_embeddings = true, gemma.embedding_scale = std::sqrt(24.0), gemma.gate = gelu_gate();
  gemma.attention_scale = 0.25;
  gemma.rope = {{.theta = 10000}, {.theta = 1e6, .scaling = {.kind = RopeScaling::linear, .factor = 8}}};
  gemma.layer[0].window = gemma.layer[1].window = 5, gemma.layer[2].rope = 1;
  DecoderSpec qwen = expert_spec();
  qwen.qk_norm = true, qwen.norm.eps = 1e-6, qwen.rope[0].theta = 1e6;
  DecoderSpec smol = dense_spec();
  smol.layer[2].rope = -1, smol.tied_embeddings = true;
  DecoderSpec oss = expert_spec();
  oss.layer[0].window = oss.layer[2].window = 6, oss.sinks = true, oss.gate = clamped_gate(7, 1.702);
  oss.qkv_bias = oss.output_bias = oss.mlp_bias = true;
  oss.rope[0] = {.theta = 150000, .scaling = {.kind = RopeScaling::yarn, .factor = 32, .original_context = 16}};
  for (const DecoderSpec& s : {gemma, qwen, smol, oss}) {
    const RandomModel m(s);
    const Row want = defined_logits(m);
    EXPECT_LT(difference(computed_logits(m), want), kTolerance * largest(want));
  }
}

TEST(CpuModel, ACacheWithoutWindowsGoesBackToAnyLength) {
  const RandomModel m(dense_spec());
  CpuModel model(m.spec, m.weights, {.batch = 4, .positions = 32});
  KeyValueCache cache(m.spec, m.spec.layers, 32, 4);
  const std::vector<int32_t> ids = some_ids(m.spec);
  for (size_t i = 0; i < 20; i += 4) (void)model.extend(std::span(ids).subspan(i, 4), cache);
  for (int64_t length = 20; length >= 0; --length) EXPECT_TRUE(cache.can_rewind(length)) << length;
}

}  // namespace
}  // namespace ingot::decode
