#include "ingot/engines/ttt/ttt.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cmath>

#include "ingot/core/comm/ranks.test.h"
#include "ingot/core/cpu/shared_counter.h"
#include "ingot/engines/ttt/adaptation_case.test.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

using testing::small_golf;
using testing::small_nano;

using Case = testing::AdaptationCase;
using Found = testing::ChunkLosses;
Found by_document(const Case& k, const AdaptationOptions& o) { return testing::chunk_losses(k, k.flat, o); }

// The rule as it is written, for one document: everything is recomputed at each step, all tokens of the window are
// scored, and AdamW follows its formula.
std::vector<double> by_definition(const Case& k, int64_t document, const AdaptationOptions& o) {
  const int64_t begin = k.begins[size_t(document)];
  const int64_t targets = std::min(int64_t(k.tokens.size()) - 1, begin + k.lengths[size_t(document)]) - begin;
  Gpt model(k.config, DType::f64,
            {.capacity = o.window, .training = true, .max_adapter_rank = o.adapters.rank, .max_positions = o.window});
  DocumentAdapters adapters(k.config, model.program(), o.adapters, DType::f64, 1, {}, {});
  std::vector<double> square(size_t(adapters.numbers()), 0), chunks;
  GptAdapters values = adapters.values(0, 1), gradients = adapters.gradients(1);
  double* const p = static_cast<double*>(values.layer_calls[0].q.a.data);  // of all adapters, in turn
  const double* const g = static_cast<const double*>(gradients.layer_calls[0].q.a.data);
  const int64_t count = (targets + o.chunk - 1) / o.chunk;
  for (int64_t c = 0; c < count; ++c) {
    const int64_t end = std::min(targets, (c + 1) * o.chunk), first = std::max<int64_t>(0, end - o.window);
    std::vector<int32_t> x(k.tokens.begin() + begin + first, k.tokens.begin() + begin + end),
        y(k.tokens.begin() + begin + first + 1, k.tokens.begin() + begin + end + 1), positions(x.size());
    for (size_t i = 0; i < x.size(); ++i) positions[i] = int32_t(i);
    std::vector<int32_t> cu = {0, int32_t(x.size())};
    std::vector<double> loss(x.size(), NAN), dloss(x.size(), 0);
    for (int64_t t = c * o.chunk; t < end; ++t) dloss[size_t(t - first)] = 1 / double(o.chunk);
    const int64_t n = int64_t(x.size());
    model.losses_and_gradients(
        k.flat, {Tensor(x.data(), {n}), Tensor(y.data(), {n}), Tensor(positions.data(), {n}), Tensor(cu.data(), {2})},
        Tensor(dloss.data(), {n}), Tensor(loss.data(), {n}), {}, &values, &gradients);
    double sum = 0;
    for (int64_t t = c * o.chunk; t < end; ++t) sum += loss[size_t(t - first)];
    chunks.push_back(sum);
    for (size_t i = 0; i < square.size(); ++i) {
      square[i] = o.adapters.beta2 * square[i] + (1 - o.adapters.beta2) * g[i] * g[i];
      const double corrected = square[i] / (1 - std::pow(o.adapters.beta2, double(c + 1)));
      p[i] -= o.adapters.lr * (o.adapters.weight_decay * p[i] + g[i] / (std::sqrt(corrected) + o.adapters.eps));
    }
  }
  return chunks;
}

TEST(ttt, scores_follow_the_rule) {
  for (const bool golf : {false, true}) {
    const Case k(golf ? small_golf() : small_nano(), {27, 9, 1, 14, 4, 5});
    const Found found = by_document(k, k.options());
    ASSERT_EQ(found.size(), 6u);
    for (const auto& [document, chunks] : found) {
      const std::vector<double> want = by_definition(k, document, k.options());
      ASSERT_EQ(chunks.size(), want.size()) << document;
      for (size_t c = 0; c < want.size(); ++c)  // where g is nearly 0, rounding decides sign(g), and so the first step
        EXPECT_NEAR(chunks[c], want[c], 1e-8) << "document " << document << ", chunk " << c;
    }
  }
}

TEST(ttt, no_score_sees_a_token_after_it) {
  const Case k(small_golf(), {33, 21});
  const Found before = by_document(k, k.options());
  for (const int64_t t : {5, 13, 16, 29}) {
    Case changed = k;
    changed.flat.data = changed.memory.data();
    for (int64_t i = t + 1; i < 33; ++i) changed.tokens[size_t(i)] = 1 + (k.tokens[size_t(i)] + 3) % 5;
    const Found after = by_document(changed, k.options());
    EXPECT_EQ(after.at(1), before.at(1)) << "another document's";
    size_t same = 0;
    for (int64_t c = 0; c < 9; ++c) {
      const int64_t end = std::min<int64_t>(33, (c + 1) * 4);  // its last target is token `end`
      if (end <= t)
        EXPECT_EQ(after.at(0)[size_t(c)], before.at(0)[size_t(c)]) << "chunk " << c << " of tokens up to " << t;
      else
        EXPECT_NE(after.at(0)[size_t(c)], before.at(0)[size_t(c)]) << "chunk " << c << ": the test changed nothing";
      same += end <= t;
    }
    EXPECT_GT(same, 0u);
  }
}

// Chunks of a single token, for separate scores.
TEST(ttt, no_single_score_sees_a_token_after_it) {
  const Case k(small_golf(), {19, 8});
  for (const Inexact way : {Inexact::none, Inexact::stale_keys, Inexact::chunk_gradients}) {
    AdaptationOptions o = k.options();
    o.chunk = 1, o.inexact = way;
    const Found before = by_document(k, o);
    ASSERT_EQ(before.at(0).size(), 19u);
    for (int64_t t = 0; t < 18; ++t) {
      Case changed = k;
      changed.flat.data = changed.memory.data();
      for (int64_t i = t + 1; i < 19; ++i) changed.tokens[size_t(i)] = 1 + (k.tokens[size_t(i)] + 3) % 5;
      const Found after = by_document(changed, o);
      EXPECT_EQ(after.at(1), before.at(1));
      for (int64_t c = 0; c < 19; ++c)  // the score of token c + 1
        EXPECT_EQ(after.at(0)[size_t(c)] == before.at(0)[size_t(c)], c + 1 <= t) << c << ", tokens up to " << t;
    }
  }
}

TEST(ttt, documents_do_not_depend_on_each_other_or_on_their_order) {
  for (const DType type : {DType::f64, DType::f32}) {
    const Case k(small_golf(), {27, 9, 16, 14, 4, 30}, type);
    const Found together = by_document(k, k.options());
    for (const int64_t documents : {1, 3, 6, 64}) {
      AdaptationOptions o = k.options();
      o.documents = documents;
      EXPECT_EQ(by_document(k, o), together) << documents << " side by side";
    }
    Case turned = k;  // each document's tokens stay, their order turns
    turned.flat.data = turned.memory.data();
    turned.tokens.clear(), turned.begins.clear();
    for (size_t d = 6; d-- > 0;) {
      turned.begins.push_back(int64_t(turned.tokens.size()));
      turned.tokens.insert(turned.tokens.end(), k.tokens.begin() + k.begins[d],
                           k.tokens.begin() + k.begins[d] + k.lengths[d]);
    }
    std::reverse(turned.lengths.begin(), turned.lengths.end());
    const Found there = by_document(turned, k.options());
    for (int64_t d = 1; d < 5; ++d) EXPECT_EQ(there.at(5 - d), together.at(d)) << "document " << d;
    // The source's last token is no input: the previously last token has gained a target, and the new last token has
    // lost its target.
    EXPECT_EQ(std::vector(there.at(0).begin(), there.at(0).begin() + 7),
              std::vector(together.at(5).begin(), together.at(5).begin() + 7));
  }
}

// Gradients that end at the chunk equal the rule's in a document's first chunk, and scores equal the rule's until the
// step on the second chunk; with stale keys only the first chunk's score equals the rule's.
TEST(ttt, inexact_methods_give_different_scores_that_depend_on_no_other_document) {
  for (const DType type : {DType::f64, DType::f32}) {
    const Case k(small_golf(), {33, 9, 16, 14, 4, 30}, type);
    const Found exact = by_document(k, k.options());
    for (const Inexact way : {Inexact::stale_keys, Inexact::chunk_gradients}) {
      AdaptationOptions o = k.options();
      o.inexact = way;
      const Found found = by_document(k, o);
      const size_t same = way == Inexact::stale_keys ? 1 : 2;
      for (const auto& [document, chunks] : exact) {
        ASSERT_EQ(found.at(document).size(), chunks.size());
        for (size_t c = 0; c < chunks.size(); ++c)
          if (c < same)
            EXPECT_NEAR(found.at(document)[c], chunks[c], type == DType::f64 ? 1e-9 : 1e-3) << document << ' ' << c;
          else
            EXPECT_GT(std::abs(found.at(document)[c] - chunks[c]), 1e-9) << document << ' ' << c;
      }
      for (const int64_t documents : {1, 6}) {
        o.documents = documents;
        EXPECT_EQ(by_document(k, o), found) << documents << " side by side";
      }
      o.documents = 2;
      Case changed = k;
      changed.flat.data = changed.memory.data();
      for (int64_t i = 14; i < 33; ++i) changed.tokens[size_t(i)] = 1 + (k.tokens[size_t(i)] + 3) % 5;
      const Found after = by_document(changed, o);
      for (size_t c = 0; c < found.at(0).size(); ++c)
        EXPECT_EQ(after.at(0)[c] == found.at(0)[c], c < 3) << "chunk " << c;
    }
  }
}

TEST(ttt, a_chunk_is_scored_before_training_on_it_and_the_last_chunk_is_not_trained_on) {
  const Case k(small_nano(), {27, 9, 4});
  AdaptationOptions o = k.options();
  std::map<int64_t, int64_t> scored, learnt;
  int64_t targets = 0;
  o.listener = [&](const AdaptationEvent& e) {
    if (e.kind == AdaptationEvent::score) {
      EXPECT_EQ(e.chunk, scored[e.document]++);
      EXPECT_EQ(e.updates, learnt[e.document]);
      EXPECT_EQ(e.updates, e.chunk);
      EXPECT_EQ(e.first, k.begins[size_t(e.document)] + 4 * e.chunk + 1);
      targets += e.end - e.first;
    } else {
      EXPECT_EQ(e.chunk, learnt[e.document]++);
      EXPECT_EQ(e.chunk + 1, scored[e.document]) << "learnt before it was scored";
    }
  };
  std::vector<DocumentScore> documents;
  const AdaptedScore s = score_adapted(k.config, k.flat, Case::ByteTokens(k.config.vocab), k.source(), o, &documents);
  EXPECT_EQ(targets, 39);
  EXPECT_EQ(s.targets, 39);
  EXPECT_EQ(s.bytes, 39 - 2);  // two targets are the next document's bos
  EXPECT_EQ(scored, (std::map<int64_t, int64_t>{{0, 7}, {1, 3}, {2, 1}}));
  EXPECT_EQ(learnt, (std::map<int64_t, int64_t>{{0, 6}, {1, 2}, {2, 0}}));
  EXPECT_EQ(s.updates, 8);
  EXPECT_EQ(s.whole_tokens, 2 * 12);  // the first document alone, its chunks 4 and 5 after 3 and 4
  EXPECT_GT(s.whole_seconds, 0);
  double sum = 0;
  for (const DocumentScore& d : documents) sum += d.loss_sum;
  EXPECT_DOUBLE_EQ(sum / 39, s.loss);
}

TEST(ttt, learns_a_text_that_repeats_itself) {
  Case k(small_nano(), {120});
  for (size_t t = 1; t < k.tokens.size(); ++t) k.tokens[t] = 1 + int32_t(t % 4);
  const std::vector<double> chunks = by_document(k, k.options()).at(0);
  EXPECT_LT(chunks[25], 0.5 * chunks[0]);
}

TEST(ttt, saved_adapters_are_the_ones_that_documents_begin_with) {
  const Case k(small_golf(), {40});
  const testing::TemporaryDirectory dir;
  const LayerProgram program = layer_program(k.config, false);
  const AdapterOptions o{.rank = 3};
  DocumentAdapters some(k.config, program, o, DType::f64, 2, {}, {});
  testing::fill_normal(some.gradients(2).head.b, 5);
  some.step(2);
  const DocumentAdapters::Saved saved = some.saved(1);
  save_safetensors(dir.path() + "/a.safetensors", saved.tensors);
  DocumentAdapters other(k.config, program, o, DType::f64, 3, {}, {});
  other.begin_from(SafetensorsFile(dir.path() + "/a.safetensors"));
  for (int64_t d = 0; d < 3; ++d) EXPECT_EQ(other.saved(d).memory, saved.memory);
  DocumentAdapters narrow(k.config, program, {.rank = 2}, DType::f64, 1, {}, {});
  try {
    narrow.begin_from(SafetensorsFile(dir.path() + "/a.safetensors"));
    ADD_FAILURE() << "adapters of another rank were taken";
  } catch (const Error& e) { EXPECT_NE(std::string(e.what()).find("(3, "), std::string::npos) << e.what(); }
}

TEST(ttt, ranks_share_the_documents_and_score_the_same_bits) {
  const Case k(small_golf(), {27, 9, 16, 14, 4, 30, 8}, DType::f32);
  AdaptationOptions o = k.options();
  o.documents = 3;
  const Case::ByteTokens tokenizer(k.config.vocab);
  std::vector<DocumentScore> alone;
  const AdaptedScore one = score_adapted(k.config, k.flat, tokenizer, k.source(), o, &alone);
  for (const bool claims : {false, true})
    for (const int world : {2, 3, 9}) {  // with nine ranks some have no document
      SharedCounter counter;
      std::vector<AdaptedScore> totals(static_cast<size_t>(world));
      std::atomic<int64_t> scored = 0;
      const auto errors = testing::run_ranks(world, 60, [&](SocketCommunicator& ranks) {
        AdaptationOptions shared = o;
        shared.ranks = &ranks;
        if (claims) shared.claim = [&] { return counter.next(); };
        shared.listener = [&](const AdaptationEvent& e) { scored += e.kind == AdaptationEvent::score; };
        std::vector<DocumentScore> documents;
        totals[size_t(ranks.rank())] = score_adapted(k.config, k.flat, tokenizer, k.source(), shared, &documents);
        ASSERT_EQ(documents.size(), alone.size());
        for (size_t d = 0; d < alone.size(); ++d) {
          EXPECT_EQ(documents[d].loss_sum, alone[d].loss_sum) << "document " << d << " of " << world << " ranks";
          EXPECT_EQ(documents[d].targets, alone[d].targets);
        }
      });
      for (const std::string& e : errors) EXPECT_EQ(e, "");
      for (const AdaptedScore& total : totals) {
        EXPECT_EQ(total.loss, one.loss);
        EXPECT_EQ(total.bytes, one.bytes);
        EXPECT_EQ(total.updates, one.updates);
        EXPECT_EQ(total.window_tokens, one.window_tokens);
      }
      EXPECT_EQ(scored, one.updates + int64_t(alone.size())) << "a chunk was scored twice, or never";
    }
}

TEST(ttt, bad_options_are_named) {
  const Case k(small_nano(), {20});
  const auto message = [&](const std::function<void(AdaptationOptions&)>& change) {
    AdaptationOptions o = k.options();
    change(o);
    try {
      score_adapted(k.config, k.flat, Case::ByteTokens(k.config.vocab), k.source(), o);
    } catch (const Error& e) { return std::string(e.what()); }
    return std::string();
  };
  EXPECT_EQ(message([](auto& o) { o.chunk = 0; }), "adaptation: found a chunk of 0, expected at least 1");
  EXPECT_EQ(message([](auto& o) { o.window = 3; }),
            "adaptation: found a window of 3, expected at least the chunk of 4");
  EXPECT_EQ(message([](auto& o) { o.inexact = Inexact::stale_keys; }),
            "adaptation: found learned positions, expected rotary ones for what is inexact");
  EXPECT_EQ(message([](auto& o) { o.documents = 0; }), "adaptation: found 0 documents, expected at least 1");
  EXPECT_EQ(message([](auto& o) { o.adapters.rank = 0; }), "adapters: found rank 0, expected it positive");
  EXPECT_EQ(message([](auto& o) { o.adapters.lr = NAN; }), "adapters: found lr nan, expected it positive");
  EXPECT_EQ(message([](auto& o) { o.adapters.beta2 = 1; }), "adapters: found beta2 1, expected it in [0, 1)");
  EXPECT_EQ(message([](auto& o) { o.cancelled = [] { return true; }; }), "stopped by a signal");
}

}  // namespace
}  // namespace ingot
