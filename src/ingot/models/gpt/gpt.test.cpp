#include "ingot/models/gpt/gpt.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/models/gpt/gpt_variants.test.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::factorised;
using testing::small_golf;
using testing::small_nano;
using testing::Variant;
using testing::variants;

// Packed documents of the given lengths, with all parameters random, so that every path has an effect.
struct Case {
  Case(const GptConfig& c, std::vector<int> lengths, bool looping, bool training, DType dtype = DType::f64,
       int64_t adapter_rank = 3)
      : config(c), layout(c), dtype(dtype) {
    cu.push_back(0);
    for (int n : lengths) {
      for (int i = 0; i < n; ++i) positions.push_back(i);
      cu.push_back(cu.back() + n);
    }
    T = cu.back();
    const Rng rng(5, Purpose::test);
    for (int64_t t = 0; t < T; ++t) {
      tokens.push_back(int32_t(rng.below(uint64_t(t), uint64_t(c.vocab))));
      targets.push_back(int32_t(rng.below(uint64_t(t) + 1000, uint64_t(c.vocab))));
    }
    if (T > 2) targets[1] = -1;
    weights.resize(size_t(layout.padded_count() * 8));
    grads = weights;
    initialise(c, layout, flat(), 3);
    for (const Parameter& p : layout.all()) {
      const Tensor w = layout.view(flat(), p);
      const auto start = testing::values(w);
      testing::fill_normal(w, uint64_t(p.offset),
                           p.kind == ParameterKind::scalar ? 0.2 : 0.3 / std::sqrt(double(p.shape[-1]) / 24));
      auto moved = testing::values(w);
      if (p.kind == ParameterKind::scalar)
        for (size_t i = 0; i < moved.size(); ++i) moved[i] += std::min(start[i], 2.0);
      testing::assign(w, moved);
    }
    model = std::make_unique<Gpt>(c, dtype,
                                  GptOptions{.capacity = std::max<int64_t>(T, 1) + 3,
                                             .looping = looping,
                                             .training = training,
                                             .max_adapter_rank = adapter_rank});
    loss.resize(size_t(T));
    dloss.resize(size_t(T));
    for (int64_t t = 0; t < T; ++t) dloss[size_t(t)] = 0.5 + 0.1 * double(t % 7);
  }
  Tensor flat() { return Tensor(weights.data(), dtype, {layout.padded_count()}); }
  Tensor grad() { return Tensor(grads.data(), dtype, {layout.padded_count()}); }
  TokenBatch batch() {
    return {Tensor(tokens.data(), {T}), Tensor(targets.data(), {T}), Tensor(positions.data(), {T}),
            Tensor(cu.data(), {int64_t(cu.size())})};
  }
  double weighted_loss(const GptAdapters* adapters = nullptr) {
    model->losses(flat(), batch(), Tensor(loss.data(), {T}), adapters);
    return std::inner_product(loss.begin(), loss.end(), dloss.begin(), 0.0);
  }

  GptConfig config;
  ParameterLayout layout;
  DType dtype;
  int64_t T;
  std::vector<int32_t> cu, positions, tokens, targets;
  std::vector<uint8_t> weights, grads;
  std::vector<double> loss, dloss;
  std::unique_ptr<Gpt> model;
};

TEST(gpt, every_gradient_matches_finite_differences) {
  for (const Variant& v : variants()) {
    Case k(v.config, {7, 1, 5}, v.looping, true);
    fill_zero(k.grad());
    k.model->losses_and_gradients(k.flat(), k.batch(), Tensor(k.dloss.data(), {k.T}), Tensor(k.loss.data(), {k.T}),
                                  k.grad());
    for (const Parameter& p : k.layout.all()) {
      const double error = testing::gradient_error([&] { return k.weighted_loss(); }, k.layout.view(k.flat(), p),
                                                   k.layout.view(k.grad(), p), uint64_t(p.offset) + 1, 1);
      EXPECT_LT(error, 1e-6) << v.name << ": " << p.name;
    }
  }
}

TEST(gpt, gradients_accumulate_and_losses_agree_with_the_forward_alone) {
  Case k(small_golf(), {6, 9}, true, true);
  fill_zero(k.grad());
  const Tensor dloss(k.dloss.data(), {k.T}), loss(k.loss.data(), {k.T});
  k.model->losses_and_gradients(k.flat(), k.batch(), dloss, loss, k.grad());
  const auto once = testing::values(k.grad()), losses = testing::values(loss);
  k.model->losses_and_gradients(k.flat(), k.batch(), dloss, loss, k.grad());
  auto twice = once;
  for (double& g : twice) g *= 2;
  EXPECT_TRUE(testing::compare(k.grad(), twice, 1e-12, 1e-12).ok);
  Case forward(small_golf(), {6, 9}, true, false);
  forward.weighted_loss();
  EXPECT_EQ(forward.loss, losses);
  EXPECT_LT(forward.model->arena_bytes(), k.model->arena_bytes());
}

TEST(gpt, packed_documents_equal_documents_alone) {
  for (const Variant& v : variants()) {
    Case packed(v.config, {4, 6, 3}, v.looping, false);
    packed.weighted_loss();
    const auto all = packed.loss;
    for (size_t s = 0; s + 1 < packed.cu.size(); ++s) {
      TokenBatch b = packed.batch();
      int32_t cu[2] = {0, packed.cu[s + 1] - packed.cu[s]};
      for (Tensor* t : {&b.tokens, &b.targets, &b.positions}) *t = t->slice(0, packed.cu[s], packed.cu[s + 1]);
      b.cu_seqlens = Tensor(cu, {2});
      std::vector<double> alone(static_cast<size_t>(cu[1]));
      packed.model->losses(packed.flat(), b, Tensor(alone.data(), {cu[1]}));
      for (int i = 0; i < cu[1]; ++i) EXPECT_NEAR(alone[size_t(i)], all[size_t(packed.cu[s] + i)], 1e-12) << v.name;
    }
  }
}

// More than 1,024 tokens are processed in blocks, of different sizes for the parts. Without adapters, because adapters
// need a single block.
TEST(gpt, gradients_of_many_tokens_are_the_sum_of_their_parts) {
  for (const Variant& v : {Variant{"golf, looping", small_golf(), true}, Variant{"nano", small_nano(), false}}) {
    Case k(v.config, std::vector<int>(38, 30), v.looping, true, DType::f64, 0);
    const int64_t half = k.T / 2;
    const auto run = [&](int64_t begin, int64_t end, const std::vector<int32_t>& cu) {
      const auto part = [&](std::vector<int32_t>& v) { return Tensor(v.data() + begin, {end - begin}); };
      std::vector<int32_t> offsets = cu;
      k.model->losses_and_gradients(
          k.flat(),
          {part(k.tokens), part(k.targets), part(k.positions), Tensor(offsets.data(), {int64_t(offsets.size())})},
          Tensor(k.dloss.data() + begin, {end - begin}), Tensor(k.loss.data() + begin, {end - begin}), k.grad());
    };
    fill_zero(k.grad());
    run(0, k.T, k.cu);
    const auto whole = testing::values(k.grad()), losses = k.loss;
    fill_zero(k.grad());
    const std::vector<int32_t> cu(k.cu.begin(), k.cu.begin() + 20);
    run(0, half, cu);
    run(half, k.T, cu);
    const auto result = testing::compare(k.grad(), whole, 1e-11, 1e-11);
    EXPECT_TRUE(result.ok) << v.name << ": " << result.message;
    for (size_t t = 0; t < losses.size(); ++t) ASSERT_NEAR(k.loss[t], losses[t], 1e-12) << t;
  }
}

TEST(gpt, cached_generation_equals_the_full_forward) {
  for (const Variant& v : variants()) {
    Case k(v.config, {11}, v.looping, false);
    std::vector<double> full(size_t(k.T * k.config.vocab)), step(full.size());
    std::vector<int32_t> rows(size_t(k.T));
    std::iota(rows.begin(), rows.end(), 0);
    k.model->logits(k.flat(), k.batch(), Tensor(rows.data(), {k.T}), Tensor(full.data(), {k.T, k.config.vocab}));
    GptCache cache(k.config, k.model->program(), 2, 16, DType::f64);
    for (int64_t begin = 0; begin < k.T;) {  // a prompt of 4 tokens, then single tokens
      const int64_t end = begin == 0 ? 4 : begin + 1;
      TokenBatch b = k.batch();
      int32_t cu[2] = {0, int32_t(end - begin)};
      for (Tensor* t : {&b.tokens, &b.targets, &b.positions}) *t = t->slice(0, begin, end);
      b.cu_seqlens = Tensor(cu, {2});
      k.model->extend(k.flat(), b, {1}, cache, Tensor(rows.data(), {end - begin}),
                      Tensor(step.data() + begin * k.config.vocab, {end - begin, k.config.vocab}));
      begin = end;
    }
    EXPECT_EQ(cache.length(1), k.T);
    for (size_t i = 0; i < full.size(); ++i) ASSERT_NEAR(step[i], full[i], 1e-11) << v.name << " at " << i;
  }
}

struct Adapters {
  Adapters(const GptConfig& c, const LayerProgram& program, int64_t segments, int64_t rank) {
    const int64_t q = c.heads * c.head_dim, kv = c.kv_heads * c.head_dim;
    const auto pair = [&](int64_t in, int64_t out) {
      AdapterPair p;
      memory.emplace_back(size_t(segments * rank * in));
      p.a = Tensor(memory.back().data(), {segments, rank, in});
      memory.emplace_back(size_t(segments * rank * out));
      p.b = Tensor(memory.back().data(), {segments, out, rank});
      return p;
    };
    for (size_t i = 0; i < program.layer_calls.size(); ++i)
      set.layer_calls.push_back(
          {pair(c.dim, q), pair(c.dim, kv), pair(c.dim, kv), pair(c.dim, c.dim), pair(c.dim, c.dim)});
    set.head = pair(c.dim, c.vocab);
  }
  std::vector<AdapterPair> pairs() const {
    std::vector<AdapterPair> all;
    for (const LayerCallAdapters& a : set.layer_calls) all.insert(all.end(), {a.q, a.k, a.v, a.o, a.mlp});
    all.push_back(set.head);
    return all;
  }
  std::vector<std::vector<double>> memory;
  GptAdapters set;
};

TEST(gpt, adapters_with_a_zero_factor_change_nothing) {
  Case k(small_golf(), {4, 6}, true, false);
  k.weighted_loss();
  const auto base = k.loss;
  Adapters adapters(k.config, k.model->program(), 2, 3);
  for (const AdapterPair& p : adapters.pairs()) testing::fill_normal(p.a, 8);
  k.weighted_loss(&adapters.set);
  for (size_t t = 0; t < base.size(); ++t) EXPECT_NEAR(k.loss[t], base[t], 1e-13);
}

// w (N, K) += B (N, R) A (R, K)
void add_product(const Tensor& w, const Tensor& b, const Tensor& a) {
  for (int64_t n = 0; n < w.size(0); ++n)
    for (int64_t k = 0; k < w.size(1); ++k)
      for (int64_t r = 0; r < a.size(0); ++r)
        w.ptr<double>()[n * w.size(1) + k] += b.ptr<double>()[n * a.size(0) + r] * a.ptr<double>()[r * w.size(1) + k];
}

// The adapters of o and mlp read different tensors than these weights.
TEST(gpt, an_adapter_of_a_document_is_its_product_added_to_the_weights_of_q_k_and_v) {
  const std::vector<int> lengths = {4, 6};
  Case k(small_golf(), lengths, false, false);
  Adapters adapters(k.config, k.model->program(), 2, 3);
  uint64_t seed = 40;
  for (const LayerCallAdapters& each : adapters.set.layer_calls)
    for (const AdapterPair& p : {each.q, each.k, each.v}) {
      testing::fill_normal(p.a, ++seed, 0.3);
      testing::fill_normal(p.b, ++seed, 0.3);
    }
  k.weighted_loss(&adapters.set);
  for (int64_t s = 0; s < 2; ++s) {
    Case merged(small_golf(), lengths, false, false);
    const auto& layer_calls = k.model->program().layer_calls;
    for (size_t i = 0; i < layer_calls.size(); ++i) {
      const LayerCallAdapters& each = adapters.set.layer_calls[i];
      const std::string attention = "blocks." + std::to_string(layer_calls[i].layer) + ".attn.";
      for (const auto& [name, pair] : {std::pair{"q", each.q}, {"k", each.k}, {"v", each.v}})
        add_product(merged.layout.view(merged.flat(), attention + name + ".weight"), pair.b.row(s), pair.a.row(s));
    }
    merged.weighted_loss();
    for (int32_t t = k.cu[size_t(s)]; t < k.cu[size_t(s) + 1]; ++t)
      EXPECT_NEAR(k.loss[size_t(t)], merged.loss[size_t(t)], 1e-12) << "document " << s << ", token " << t;
  }
}

TEST(gpt, adapter_gradients_match_finite_differences_with_the_base_frozen) {
  for (const Variant& v : variants()) {
    Case k(v.config, {4, 6}, v.looping, true);
    Adapters adapters(k.config, k.model->program(), 2, 2), grads(k.config, k.model->program(), 2, 2);
    uint64_t seed = 40;
    for (const AdapterPair& p : adapters.pairs()) {
      testing::fill_normal(p.a, ++seed, 0.3);
      testing::fill_normal(p.b, ++seed, 0.3);
    }
    k.model->losses_and_gradients(k.flat(), k.batch(), Tensor(k.dloss.data(), {k.T}), Tensor(k.loss.data(), {k.T}),
                                  Tensor(), &adapters.set, &grads.set);
    const auto values = adapters.pairs(), slopes = grads.pairs();
    for (size_t i = 0; i < values.size(); ++i) {
      const auto f = [&] { return k.weighted_loss(&adapters.set); };
      EXPECT_LT(testing::gradient_error(f, values[i].a, slopes[i].a, i + 1, 1), 1e-6)
          << v.name << ", A of adapter " << i;
      EXPECT_LT(testing::gradient_error(f, values[i].b, slopes[i].b, i + 1, 1), 1e-6)
          << v.name << ", B of adapter " << i;
    }
  }
}

// Adapters are folded into a matrix only where all documents are long enough for its shape: neither document of the
// second case is long enough for golf's q, and one of the third case is too short even for k and v.
TEST(gpt, adapters_folded_into_weights_of_each_document_give_the_same_losses_and_gradients) {
  const Variant cases[] = {
      {"golf", small_golf(), true}, {"factorised", factorised(), true}, {"nano", small_nano(), false}};
  for (const Variant& v : cases)
    for (const std::vector<int>& lengths : {std::vector<int>{20, 20, 18}, {11, 12}, {30, 6}, {25}}) {
      Case k(v.config, lengths, v.looping, true);
      const int64_t documents = int64_t(lengths.size());
      Adapters adapters(k.config, k.model->program(), documents, 2);
      uint64_t seed = 40;
      for (const AdapterPair& p : adapters.pairs()) {
        testing::fill_normal(p.a, ++seed, 0.3);
        testing::fill_normal(p.b, ++seed, 0.3);
      }
      std::vector<double> losses[2];
      std::vector<std::vector<double>> gradients[2];
      for (const bool folded : {false, true}) {
        Gpt model(k.config, DType::f64,
                  {.capacity = k.T,
                   .looping = v.looping,
                   .training = true,
                   .max_adapter_rank = 2,
                   .most_folded = folded ? documents : 0});
        Adapters grads(k.config, k.model->program(), documents, 2);
        for (const AdapterPair& p : grads.pairs()) fill_zero(p.a), fill_zero(p.b);
        model.losses_and_gradients(k.flat(), k.batch(), Tensor(k.dloss.data(), {k.T}), Tensor(k.loss.data(), {k.T}),
                                   Tensor(), &adapters.set, &grads.set);
        losses[folded] = k.loss;
        gradients[folded] = grads.memory;
      }
      const auto close = [](const std::vector<double>& a, const std::vector<double>& b) {
        Buffer got(DType::f64, {int64_t(a.size())});
        testing::assign(got, a);
        return testing::compare(got, b, 1e-11, 1e-11).ok;
      };
      EXPECT_TRUE(close(losses[1], losses[0])) << v.name;
      for (size_t i = 0; i < gradients[0].size(); ++i)
        EXPECT_TRUE(close(gradients[1][i], gradients[0][i])) << v.name << ", adapter " << i / 2;
    }
}

TEST(gpt, cutting_the_last_layer_call_changes_nothing) {
  for (const Variant& v : variants())
    for (const bool looping : {false, true}) {
      const std::vector<int> lengths = {4, 4, 6, 3, 0, 5};
      const std::vector<int32_t> last = {2, 2, 1, 3, 0, 0};
      Case k(v.config, lengths, looping, true);
      Adapters adapters(k.config, k.model->program(), 6, 2);
      uint64_t seed = 40;
      for (const AdapterPair& p : adapters.pairs()) {
        testing::fill_normal(p.a, ++seed, 0.3);
        testing::fill_normal(p.b, ++seed, 0.3);
      }
      TokenBatch batch = k.batch();
      std::vector<int32_t> targets;
      for (size_t s = 0; s < last.size(); ++s)
        targets.insert(targets.end(), k.targets.begin() + k.cu[s + 1] - last[s], k.targets.begin() + k.cu[s + 1]);
      batch.last = last;
      batch.targets = Tensor(targets.data(), {8});
      std::vector<double> losses[3], dloss(k.dloss.begin(), k.dloss.begin() + 8);
      std::vector<std::vector<double>> gradients[2];
      for (const bool cut : {false, true}) {
        Gpt model(k.config, DType::f64,
                  {.capacity = k.T + 2,
                   .looping = looping,
                   .training = true,
                   .keep_rows = true,
                   .max_adapter_rank = 2,
                   .most_scored = 9,
                   .cut_last = cut});
        Adapters grads(k.config, k.model->program(), 6, 2);
        for (const AdapterPair& p : grads.pairs()) fill_zero(p.a), fill_zero(p.b);
        losses[cut].assign(8, NAN), losses[2].assign(8, NAN);
        model.losses_and_gradients(k.flat(), batch, Tensor(dloss.data(), {8}), Tensor(losses[cut].data(), {8}), {},
                                   &adapters.set, &grads.set);
        gradients[cut] = grads.memory;
        model.losses(k.flat(), batch, Tensor(losses[2].data(), {8}), &adapters.set);
        EXPECT_EQ(losses[2], losses[cut]);
      }
      for (size_t t = 0; t < 8; ++t) EXPECT_NEAR(losses[1][t], losses[0][t], 1e-12) << v.name << ", token " << t;
      double largest = 0;
      for (size_t i = 0; i < gradients[0].size(); ++i)
        for (size_t n = 0; n < gradients[0][i].size(); ++n) {
          largest = std::max(largest, std::abs(gradients[0][i][n]));
          ASSERT_NEAR(gradients[1][i][n], gradients[0][i][n], 1e-11) << v.name << ", adapter " << i / 2;
        }
      EXPECT_GT(largest, 0.01);
    }
}

// Cached keys and values count as constants: only the later tokens have gradients.
TEST(gpt, gradients_of_segments_continued_from_a_cache_match_finite_differences) {
  for (const int64_t window : {0, 7}) {
    const std::vector<int> before = {5, 3}, after = {3, 4};
    Case prefix(small_golf(), before, true, false), k(small_golf(), after, true, true);
    for (size_t t = 0; t < k.positions.size(); ++t) k.positions[t] += before[t < 3 ? 0 : 1];
    Gpt model(k.config, DType::f64,
              {.capacity = k.T, .looping = true, .training = true, .max_adapter_rank = 2, .most_keys = 8});
    GptCache cache(k.config, model.program(), 3, 9, DType::f64);
    const std::vector<int64_t> sequences = {2, 0};
    const CachedSegments cached{cache, sequences, window};
    Adapters adapters(k.config, model.program(), 2, 2), grads(k.config, model.program(), 2, 2);
    uint64_t seed = 40;
    for (const AdapterPair& p : adapters.pairs()) {
      testing::fill_normal(p.a, ++seed, 0.3);
      testing::fill_normal(p.b, ++seed, 0.3);
    }
    prefix.model->extend(prefix.flat(), prefix.batch(), sequences, cache, Tensor(nullptr, DType::i32, {0}), {});
    const Tensor loss(k.loss.data(), {k.T}), dloss(k.dloss.data(), {k.T});
    const auto forget = [&] { cache.truncate(2, 5), cache.truncate(0, 3); };
    for (const AdapterPair& p : grads.pairs()) fill_zero(p.a), fill_zero(p.b);
    model.losses_and_gradients(k.flat(), k.batch(), dloss, loss, {}, &adapters.set, &grads.set, &cached);
    EXPECT_EQ(cache.length(2), 8);
    EXPECT_EQ(cache.length(0), 7);
    const auto f = [&] {
      forget();
      model.losses(k.flat(), k.batch(), loss, &adapters.set, nullptr, &cached);
      return std::inner_product(k.loss.begin(), k.loss.end(), k.dloss.begin(), 0.0);
    };
    const auto values = adapters.pairs(), slopes = grads.pairs();
    for (size_t i = 0; i < values.size(); i += 3) {
      EXPECT_LT(testing::gradient_error(f, values[i].a, slopes[i].a, i + 1, 1), 1e-6) << "A of adapter " << i;
      EXPECT_LT(testing::gradient_error(f, values[i].b, slopes[i].b, i + 1, 1), 1e-6) << "B of adapter " << i;
    }
    if (window > 0) continue;
    // In a single call, without a cache, the losses are the same.
    Case whole(small_golf(), {8, 7}, true, false);
    whole.targets.assign(whole.targets.size(), -1);
    const auto is_cached = [](size_t t) { return t < 8 ? t < 5 : t < 11; };
    for (size_t t = 0, p = 0, a = 0; t < whole.tokens.size(); ++t) {
      if (!is_cached(t)) whole.targets[t] = k.targets[a];
      whole.tokens[t] = is_cached(t) ? prefix.tokens[p++] : k.tokens[a++];
    }
    forget();
    model.losses(k.flat(), k.batch(), loss, nullptr, nullptr, &cached);
    whole.weighted_loss();
    for (size_t t = 0, a = 0; t < whole.tokens.size(); ++t)
      if (!is_cached(t)) EXPECT_NEAR(whole.loss[t], k.loss[a++], 1e-12) << "token " << t;
  }
}

// With only some of each segment's last tokens scored, these tokens' losses and gradients equal the results with all
// tokens scored.
TEST(gpt, scoring_the_last_tokens_alone_is_scoring_all_with_weights_of_zero) {
  for (const Variant& v : variants())
    for (const bool adapted : {false, true}) {
      const std::vector<int> lengths = {4, 4, 6, 3, 0, 5};
      const std::vector<int32_t> last = {2, 2, 1, 3, 0, 0};
      Case k(v.config, lengths, v.looping, true);
      Adapters adapters(k.config, k.model->program(), 6, 2), all(k.config, k.model->program(), 6, 2),
          some(k.config, k.model->program(), 6, 2);
      uint64_t seed = 40;
      for (const AdapterPair& p : adapters.pairs()) {
        testing::fill_normal(p.a, ++seed, 0.3);
        testing::fill_normal(p.b, ++seed, 0.3);
      }
      const auto gradients = [&](Gpt& model, const TokenBatch& batch, std::vector<double>& dloss, GptAdapters& grads) {
        std::vector<double> loss(dloss.size(), NAN);
        std::fill(k.grads.begin(), k.grads.end(), 0);
        const int64_t n = int64_t(dloss.size());
        model.losses_and_gradients(k.flat(), batch, Tensor(dloss.data(), {n}), Tensor(loss.data(), {n}), k.grad(),
                                   adapted ? &adapters.set : nullptr, adapted ? &grads : nullptr);
        return loss;
      };
      std::vector<double> weights(size_t(k.T), 0), packed_weights;
      std::vector<int32_t> packed_targets;
      for (size_t s = 0; s < last.size(); ++s)
        for (int32_t t = k.cu[s + 1] - last[s]; t < k.cu[s + 1]; ++t) {
          weights[size_t(t)] = k.dloss[size_t(t)];
          packed_weights.push_back(weights[size_t(t)]);
          packed_targets.push_back(k.targets[size_t(t)]);
        }
      const std::vector<double> loss = gradients(*k.model, k.batch(), weights, all.set);
      const std::vector<double> expected = testing::values(k.grad());
      Gpt model(k.config, DType::f64,
                {.capacity = k.T, .looping = v.looping, .training = true, .max_adapter_rank = 2, .most_scored = 8});
      TokenBatch batch = k.batch();
      batch.last = last;
      batch.targets = Tensor(packed_targets.data(), {8});
      const std::vector<double> packed_loss = gradients(model, batch, packed_weights, some.set);
      size_t i = 0;
      for (size_t s = 0; s < last.size(); ++s)
        for (int32_t t = k.cu[s + 1] - last[s]; t < k.cu[s + 1]; ++t, ++i)
          EXPECT_NEAR(packed_loss[i], loss[size_t(t)], 1e-12) << v.name << ", token " << t;
      EXPECT_TRUE(testing::compare(k.grad(), expected, 1e-11, 1e-11).ok) << v.name;
      if (!adapted) continue;
      for (size_t p = 0; p < all.pairs().size(); ++p)
        for (const auto& [a, b] :
             {std::pair{all.pairs()[p].a, some.pairs()[p].a}, {all.pairs()[p].b, some.pairs()[p].b}})
          EXPECT_TRUE(testing::compare(b, testing::values(a), 1e-11, 1e-11).ok) << v.name << ", adapter " << p;
    }
}

TEST(gpt, results_do_not_depend_on_the_number_of_threads) {
  const int before = thread_count();
  std::vector<std::vector<double>> runs;
  for (int threads : {1, 2, 3}) {
    set_thread_count(threads);
    Case k(small_golf(), {20, 31}, true, true);
    fill_zero(k.grad());
    k.model->losses_and_gradients(k.flat(), k.batch(), Tensor(k.dloss.data(), {k.T}), Tensor(k.loss.data(), {k.T}),
                                  k.grad());
    runs.push_back(testing::values(k.grad()));
  }
  set_thread_count(before);
  EXPECT_EQ(runs[0], runs[1]);
  EXPECT_EQ(runs[0], runs[2]);
}

TEST(gpt, an_empty_batch_is_accepted_and_a_bad_one_is_named) {
  Case k(small_golf(), {3}, false, true);
  TokenBatch none = k.batch();
  int32_t cu[1] = {0};
  for (Tensor* t : {&none.tokens, &none.targets, &none.positions}) *t = t->slice(0, 0, 0);
  none.cu_seqlens = Tensor(cu, {1});
  k.model->losses(k.flat(), none, Tensor(k.loss.data(), {0}));
  k.tokens[2] = 999;
  try {
    k.weighted_loss();
    FAIL() << "expected an Error";
  } catch (const Error& e) { EXPECT_NE(std::string(e.what()).find("999"), std::string::npos) << e.what(); }
}

TEST(gpt_parameters, golf_has_exactly_the_published_number) {
  EXPECT_EQ(ParameterLayout(gpt_preset("golf")).count(), 35944602);
}

TEST(gpt_program, golf_runs_seventeen_layer_calls_with_the_published_skips) {
  const LayerProgram off = layer_program(gpt_preset("golf"), false), on = layer_program(gpt_preset("golf"), true);
  EXPECT_EQ(off.layer_calls.size(), 11u);
  ASSERT_EQ(on.layer_calls.size(), 17u);
  const int layers[17] = {0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9, 10};
  const int from[17] = {-1, -1, -1, -1, -1, -1, -1, -1, 7, 6, 5, 4, 3, 2, 1, 0, -1};
  for (int i = 0; i < 17; ++i) {
    EXPECT_EQ(on.layer_calls[size_t(i)].layer, layers[i]);
    EXPECT_EQ(on.layer_calls[size_t(i)].skip_from, from[i]);
    EXPECT_EQ(on.layer_calls[size_t(i)].lanes, layers[i] >= 8);
    EXPECT_EQ(on.layer_calls[size_t(i)].enters_lanes, i == 14);
  }
  const int from_off[11] = {-1, -1, -1, -1, -1, 4, 3, 2, 1, 0, -1};
  for (int i = 0; i < 11; ++i) EXPECT_EQ(off.layer_calls[size_t(i)].skip_from, from_off[i]);
  EXPECT_EQ(skip_slots(gpt_preset("golf")), 8);
}

TEST(gpt_config, a_config_survives_json_and_bad_keys_are_named) {
  const GptConfig c = factorised();
  EXPECT_EQ(to_json(gpt_config_from_json(to_json(c), "test")), to_json(c));
  for (const auto& [text, part] :
       std::vector<std::pair<std::string, std::string>>{{R"({"layer": 3})", "layer"},
                                                        {R"({"layers": "three"})", "three"},
                                                        {R"({"heads": 4, "kv_heads": 3})", "kv_heads"},
                                                        {R"({"activation": "geluu"})", "geluu"},
                                                        {R"({"rotary_dim": 3})", "rotary_dim"}}) {
    try {
      gpt_config_from_json(text, "test");
      FAIL() << "expected an Error for " << text;
    } catch (const Error& e) { EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what(); }
  }
}

}  // namespace
}  // namespace ingot
