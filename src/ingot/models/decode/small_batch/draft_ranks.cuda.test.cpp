// Draft steps, and a draft head, of a model that several GPUs share.
#ifdef INGOT_HAS_CUDA_DECODE
#include <gtest/gtest.h>

#include <map>

#include "ingot/models/decode/fixtures/draft_steps.test.h"
#include "ingot/models/decode/fixtures/several_gpus.test.h"
#include "ingot/models/draft/head/head_drafts.test.h"

namespace ingot {
namespace {

using decode::RankedModel;
using decode::Split;
using testing::DecodeCase;
using testing::DecodeModel;
using testing::ForcedStep;
using testing::kPatience;
using testing::Rows;
using namespace testing::head_drafts;

class DraftRanksCuda : public testing::SeveralGpus {
 protected:
  void SetUp() override {
    SeveralGpus::SetUp();
    if (!IsSkipped() && !testing::holds_small_batches()) GTEST_SKIP() << "an SM's memory has no room for small batches";
  }
  // A model with a key head for each GPU.
  static DecodeCase small() {
    const int64_t channels = 64 * ranks() - 32;  // a unit of 64 for each GPU
    const GptOssConfig config = testing::decode_config(96, 4 * ranks(), ranks(), 16, channels, 6, 2, 5, 2);
    return {"small", config, WeightFormat::bf16, WeightFormat::mxfp4, 14, {14}};
  }
  static DecoderOptions options(Split split = Split::tensor) {
    return {.context = 64, .wait_limit = kPatience, .gpus = ranks(), .split = split};
  }
};
INSTANTIATE_TEST_SUITE_P(, DraftRanksCuda,
                         ::testing::ValuesIn(testing::kEmulated ? std::vector<int>{2} : std::vector<int>{2, 4}),
                         testing::over_gpus);

TEST_P(DraftRanksCuda, RowsOfDraftStepsAreTheModel) {
  for (const Split split : {Split::tensor, Split::attention_experts})
    testing::check_decode(small(), [&](const DecodeModel& m, int64_t room) {
      DecoderOptions o = options(split);
      o.context = room;
      return testing::by_draft_steps(std::make_shared<RankedModel>(m.config, m.weights, o));
    });
}

TEST_P(DraftRanksCuda, RowsDoNotDependOnTheirStepAndAllRanksKeepTheAcceptedTokens) {
  const DecodeCase t = small();
  const DecodeModel m(t.config, t.dense, t.experts, 7);
  DecoderOptions o = options();
  o.slots = 2;
  Ids ids;
  for (int32_t i = 0; i < 14; ++i) ids.push_back((i * 7919 + 13) % int32_t(t.config.vocab));
  Rows want;
  RankedModel gpus(m.config, m.weights, o);
  for (const std::vector<size_t>& steps : {std::vector<size_t>(14, 1), {8, 6}, {3, 1, 7, 3}}) {
    gpus.rewind(0, 1);
    Rows found;
    for (const size_t n : steps) {
      const ForcedStep step(1, std::span(ids).subspan(found.size(), n), t.config.vocab);
      for (std::vector<float>& row : testing::take(gpus, {&step, 1})) found.push_back(std::move(row));
      for (int r = 0; r < ranks(); ++r) {
        const decode::DeviceModel& rank = gpus.rank(r);
        EXPECT_EQ(rank.length(1), int64_t(found.size()));
        const auto state = testing::download(rank.buffers(1).state, 1)[0];
        EXPECT_EQ(state.position, int32_t(found.size()));
        EXPECT_EQ(state.tokens[0], testing::download(gpus.rank(0).buffers(1).state, 1)[0].tokens[0]);
      }
    }
    if (want.empty()) want = found;
    EXPECT_EQ(found, want);
  }
  // A draft of which one token is accepted, and steps of single tokens after the step.
  gpus.rewind(5, 1);
  ForcedStep step(1, std::span(ids).subspan(5, 4), t.config.vocab);
  step.masks[1].assign(step.masks[1].size(), 0);
  step.masks[1][size_t(ids[0] / 32)] = 1u << (ids[0] % 32);
  std::vector<size_t> kept;
  testing::take(gpus, {&step, 1}, &kept);
  ASSERT_EQ(kept, std::vector<size_t>{2});
  RankedModel other(m.config, m.weights, o);
  const ForcedStep before(1, std::span(ids).first(7), t.config.vocab);
  testing::take(other, {&before, 1});
  for (RankedModel* model : {&gpus, &other}) {
    EXPECT_EQ(model->length(1), 7);
    model->extend({&ids[7], 1}, 1, 1);
  }
  std::vector<float> found(size_t(t.config.vocab)), expected(found.size());
  gpus.logits(1, found.data(), 1), other.logits(1, expected.data(), 1);
  EXPECT_EQ(found, expected);
}

// A model and a random head for it, whose guesses are mostly wrong.
struct SmallWithHead {
  testing::TemporaryDirectory dir;
  DecodeModel m;
  draft::DraftHead head;
  explicit SmallWithHead(const DecodeCase& t) : m(t.config, t.dense, t.experts, 7) {
    testing::RandomHead random;
    random.hidden = t.config.hidden, random.vocab = t.config.vocab, random.norm_before_fc = true;
    random.write(dir / "head");
    head = draft::load_draft_head(dir / "head", m.config, m.config.layers);
  }
};

TEST_P(DraftRanksCuda, AnswersWithGuessesOfAHeadAreThoseOfDraftStepsWithoutGuesses) {
  const SmallWithHead small_model(small());
  const auto& [dir, m, head] = small_model;
  const auto decoder = [&](int gpus, const draft::DraftHead* with) {
    DecoderOptions o = options();
    o.batch = kBatch, o.megakernel = false, o.gpus = gpus;
    return make_gpu_decoder(m.config, m.weights, o, with);
  };
  const auto one = decoder(1, &head), plain = decoder(ranks(), nullptr), several = decoder(ranks(), &head);
  ASSERT_TRUE(several->has_draft_head());
  const SampleOptions greedy{.sampling = {.temperature = 0}};
  int64_t equal = 0, all = 0;
  for (const int64_t prompt : {1, 11}) {
    SCOPED_TRACE(detail::concat("prompt of ", prompt));
    const Ids told = ids_of(uint64_t(prompt), prompt);
    const Outcome want = answer(*plain, told, greedy, 16, [](const Ids&) { return Ids(); });
    std::map<size_t, Ids> of_one;  // the guesses of one GPU after so many tokens
    const Outcome on_one = answer(*one, told, greedy, 16, [&](const Ids& t) {
      of_one[t.size()] = one->guess(0, 3);
      return Ids();
    });
    const Outcome found = answer(*several, told, greedy, 16, [&](const Ids& t) {
      Ids draft = several->guess(0, 3);
      EXPECT_EQ(draft.size(), t.empty() ? 0u : 3u);
      if (on_one.tokens == want.tokens && !t.empty()) ++all, equal += draft[0] == of_one[t.size()][0];
      if (t.size() % 2 == 1) draft[0] = want.tokens[t.size()];
      return draft;
    });
    EXPECT_EQ(found.tokens, want.tokens);
    EXPECT_EQ(found.length, want.length);
    EXPECT_GT(found.accepted, 3);
    EXPECT_LT(found.accepted, found.drafted);
  }
  EXPECT_GT(all, 5);
  EXPECT_GE(equal, all * 3 / 4) << "guesses differ in near ties only";
}

// The logits of a guess compare the states that a path has kept of every token.
TEST_P(DraftRanksCuda, EveryPathGivesTheHeadTheHiddenStatesOfOneGpu) {
  const SmallWithHead small_model(small());
  const auto& [dir, m, head] = small_model;
  for (const Split split : {Split::tensor, Split::attention_experts}) {
    DecoderOptions of_one = options();
    of_one.gpus = 1, of_one.megakernel = false;
    RankedModel one(m.config, m.weights, of_one, &head), several(m.config, m.weights, options(split), &head);
    ASSERT_TRUE(several.has_head());
    EXPECT_FALSE(several.rank(1).has_head());
    const Ids ids = ids_of(3, 60);
    // A prompt by the matrix kernels, where the build has them; a small batch; a single token.
    for (const int64_t n : {std::min<int64_t>(40, one.prompt_batch()), int64_t(7), int64_t(1)}) {
      SCOPED_TRACE(detail::concat(n, " tokens"));
      std::vector<std::vector<float>> logits;
      for (RankedModel* model : {&one, &several}) {
        model->extend(std::span(ids).subspan(size_t(model->length()), size_t(n)), 1);
        ASSERT_EQ(model->guess(0, 1, 1).size(), 1u);
        logits.push_back(model->rank(0).head()->last_logits());
      }
      double largest = 0;
      for (const float x : logits[0]) largest = std::max(largest, std::abs(double(x)));
      // Some thirty roundings to bf16 in series, of the model's two layers and of the head (device_head.cuda.test.cpp).
      for (size_t i = 0; i < logits[0].size(); ++i)
        EXPECT_NEAR(logits[1][i], logits[0][i], 30 * 0x1p-9 * largest) << "id " << i;
    }
  }
}

TEST_P(DraftRanksCuda, AHeadThatUsesTheModelsOutputMatrixIsRefusedWhereEachGpuHasAPart) {
  SmallWithHead s(small());
  EXPECT_EQ(gpu_unsupported_reason(s.m.config, s.m.weights, options(), &s.head), "");
  s.head.weights.head = {};
  const std::string reason = gpu_unsupported_reason(s.m.config, s.m.weights, options(), &s.head);
  EXPECT_NE(reason.find("found a draft head without an output matrix of its own over "), std::string::npos) << reason;
  EXPECT_EQ(gpu_unsupported_reason(s.m.config, s.m.weights, options(Split::attention_experts), &s.head), "");
}

}  // namespace
}  // namespace ingot
#endif
