// The CPU path against a plain definition in fp64, for every property that a spec may have.
#include "ingot/models/decode/cpu/cpu_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ingot/models/decode/fixtures/defined_model.test.h"

namespace ingot::decode {
namespace {

using testing::Definition;
using testing::RandomModel;
using Row = Definition::Row;

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

// The logits of all tokens, in steps of 1 to `most` tokens.
std::vector<float> logits_of_steps(const RandomModel& m, int64_t most) {
  const std::vector<int32_t> ids = some_ids(m.spec);
  CpuModel model(m.spec, m.weights, {.batch = CpuModel::kStepRows, .positions = 32});
  KeyValueCache cache(m.spec, m.spec.layers, 32, CpuModel::kStepRows);
  std::vector<float> all;
  for (size_t first = 0, n = 0; first < ids.size(); first += n) {
    n = std::min(ids.size() - first, size_t(std::max<int64_t>(1, most - int64_t(first % 3))));
    const auto part = std::span(ids).subspan(first, n);
    const size_t begin = all.size();
    all.resize(begin + n * size_t(m.spec.vocab));
    model.logits(most == 1 ? model.extend(part, cache) : model.extend_rows(part, cache),
                 Tensor(all.data() + begin, {int64_t(n), m.spec.vocab}));
  }
  return all;
}

TEST(CpuModel, RowsOfAStepOfManyTokensEqualSingleTokensToTheLastBit) {
  for (const Change& c : kChanges)
    for (const WeightFormat format : {WeightFormat::f32, WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4}) {
      SCOPED_TRACE(detail::concat(c.name, " ", format));
      DecoderSpec s = c.base();
      c.change(s);
      // With two query heads for each key head, attention computes a single query row by row, and several queries by
      // vectors with one row per lane. Widths are multiples of 32 for mxfp4.
      s.heads = 4, s.kv_heads = 2, s.head_dim = 16, s.hidden = 64, s.intermediate = 96;
      const RandomModel m(s, format, format);
      const std::vector<float> single = logits_of_steps(m, 1);
      for (const int64_t most : {3, 8}) EXPECT_EQ(logits_of_steps(m, most), single) << most;
    }
}

TEST(CpuModel, ACacheWithoutWindowsRewindsToAnyLength) {
  const RandomModel m(dense_spec());
  CpuModel model(m.spec, m.weights, {.batch = 4, .positions = 32});
  KeyValueCache cache(m.spec, m.spec.layers, 32, 4);
  const std::vector<int32_t> ids = some_ids(m.spec);
  for (size_t i = 0; i < 20; i += 4) (void)model.extend(std::span(ids).subspan(i, 4), cache);
  for (int64_t length = 20; length >= 0; --length) EXPECT_TRUE(cache.can_rewind(length)) << length;
}

}  // namespace
}  // namespace ingot::decode
