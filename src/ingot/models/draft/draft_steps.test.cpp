// Draft steps of Decoder::sample(): whatever the draft, the tokens are those of steps without drafts.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>

#include "ingot/models/decode/cpu/decoder.h"
#include "ingot/models/decoder.h"
#include "ingot/models/draft/answer_drafts.h"
#include "ingot/models/draft/lookup.h"
#include "ingot/models/gpt_oss/random_checkpoint.test.h"
#include "ingot/models/gpt_oss/weights.h"
#include "ingot/models/host_decoder.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::error_of;
using Ids = std::vector<int32_t>;
constexpr int64_t kVocab = 37, kContext = 64;

// A small GPT-OSS with a window of 6, so that drafts cross the window.
struct Model {
  testing::TemporaryDirectory dir;
  GptOssConfig config;
  GptOssWeights weights;
  Model() {
    testing::GptOssCheckpoint().write(dir / "m");
    config = read_gpt_oss_config(dir / "m");
    config.window = 6;
    weights = load_gpt_oss(dir / "m", config);
  }
};
std::unique_ptr<Decoder> decoder(int64_t slots = 1, int64_t batch = 8) {
  static const Model m;
  return make_decoder(m.config, m.weights, {.context = kContext, .batch = batch, .slots = slots});
}
Ids ids_of(uint64_t seed, int64_t n) {
  Ids ids(static_cast<size_t>(n));
  testing::fill_ids(Tensor(ids.data(), {n}), seed, kVocab);
  return ids;
}
void feed(Sequence& s, const Ids& ids) {
  for (size_t at = 0; at < ids.size(); at += 8)
    ASSERT_TRUE(s.extend(std::span(ids).subspan(at, std::min<size_t>(8, ids.size() - at))));
}

// What an answer may depend on at each token: biases and a mask that follow from the tokens before.
struct Case {
  const char* name;
  SampleOptions options;
  int64_t tokens = 24;
  double penalty = 0;                             // for each occurrence of a token in the answer
  std::function<bool(const Ids&, int32_t)> rule;  // whether a token may follow these tokens of the answer
};
Case make_case(const char* name, double temperature, const std::function<void(Case&)>& change = {}) {
  Case c{.name = name, .options = {.sampling = {.temperature = temperature}, .seed = 11}};
  if (change) change(c);
  return c;
}
const LogitBias kBias[] = {{3, 4.f}, {5, -2.f}, {3, 1.f}, {9, -HUGE_VALF}};
const int32_t kStops[] = {4, 17, 30};
std::vector<Case> cases() {
  return {
      make_case("greedy", 0),
      make_case("temperature", 1),
      make_case("hot", 3),
      make_case("top-k", 1.5, [](Case& c) { c.options.sampling.top_k = 3; }),
      make_case("top-p", 1.5, [](Case& c) { c.options.sampling.top_p = 0.6; }),
      make_case("min-p", 1.5, [](Case& c) { c.options.sampling.min_p = 0.3; }),
      make_case("biases", 1, [](Case& c) { c.options.bias = kBias; }),
      make_case("a smaller vocabulary", 1, [](Case& c) { c.options.vocab = 30; }),
      make_case("stop ids", 2, [](Case& c) { c.options.stop_ids = kStops; }),
      make_case("logprobs", 1, [](Case& c) { c.options.logprobs = 3; }),
      make_case("penalties", 1, [](Case& c) { c.penalty = 1.5; }),
      make_case("a mask that changes with every token", 1.5,
                [](Case& c) { c.rule = [](const Ids& t, int32_t id) { return (size_t(id) + t.size()) % 3 != 0; }; }),
      make_case("one token", 1, [](Case& c) { c.tokens = 1; }),
      make_case("more tokens than the context holds", 1, [](Case& c) { c.tokens = 500; }),
      make_case("another seed and a later step", 1, [](Case& c) { c.options.seed = 1234567, c.options.step = 40; }),
  };
}

// A guess of up to `most` tokens after these tokens of the answer.
using Guess = std::function<Ids(const Ids& answer, int64_t most)>;

struct Outcome {
  Ids tokens;
  std::vector<double> logprobs;
  Finish finish = Finish::length;
  int32_t stop_id = -1;
  int64_t length = 0, drafted = 0, accepted = 0, steps = 0;
};

// The biases and masks after `answer`.
struct Choice {
  std::vector<LogitBias> bias;
  std::vector<uint32_t> allowed;
  Choice(const Case& c, const Ids& answer) : bias(c.options.bias.begin(), c.options.bias.end()) {
    std::map<int32_t, int> counts;
    if (c.penalty != 0)
      for (const int32_t id : answer) ++counts[id];
    for (const auto& [id, n] : counts) bias.push_back({id, -float(n * c.penalty)});
    if (!c.rule) return;
    allowed.assign((kVocab + 31) / 32, 0);
    for (int32_t id = 0; id < kVocab; ++id)
      if (c.rule(answer, id)) allowed[size_t(id / 32)] |= 1u << (id % 32);
  }
};

// The answer of a case; with `guess` by draft steps, else token by token as without drafts.
Outcome answer(Decoder& d, const Ids& prompt, const Case& c, const Guess& guess = {}, int64_t most = 7) {
  Sequence s(d);
  feed(s, prompt);
  Outcome all;
  while (int64_t(all.tokens.size()) < c.tokens) {
    SampleOptions o = c.options;
    o.step += uint32_t(all.tokens.size());
    const Choice now(c, all.tokens);
    o.bias = now.bias, o.allowed = now.allowed;
    std::vector<Choice> later;
    std::vector<DraftRow> rows;
    Ids draft;
    if (guess) {
      o.drafting = true;
      draft = guess(all.tokens, most);
      Ids then = all.tokens;
      for (size_t i = 0; i < draft.size(); ++i) {
        if (c.rule && !c.rule(then, draft[i])) draft.resize(i);  // a draft ends at its first forbidden token
        if (i == draft.size()) break;
        then.push_back(draft[i]);
        later.emplace_back(c, then);
      }
      for (const Choice& row : later) rows.push_back({row.bias, row.allowed});
      o.draft = draft, o.draft_rows = rows;
    }
    const Sampled step = s.sample(o, guess ? c.tokens - int64_t(all.tokens.size()) : 1);
    EXPECT_LE(step.accepted, step.drafted);
    EXPECT_LE(step.drafted, int64_t(draft.size()));
    all.tokens.insert(all.tokens.end(), step.tokens.begin(), step.tokens.end());
    for (const TokenLogprobs& p : step.logprobs) {
      all.logprobs.push_back(p.sampled);
      for (const TokenLogprob& top : p.top) all.logprobs.push_back(top.logprob + 1000 * top.id);
    }
    all.finish = step.finish, all.stop_id = step.stop_id;
    all.drafted += step.drafted, all.accepted += step.accepted, ++all.steps;
    if (step.finish != Finish::length) break;
  }
  all.length = s.length();
  return all;
}

// Guesses that know the right answer `want`.
Guess oracle(const Ids& want) {
  return [&want](const Ids& t, int64_t most) {
    const size_t begin = std::min(t.size(), want.size()), n = std::min(size_t(most), want.size() - begin);
    return Ids(want.begin() + int64_t(begin), want.begin() + int64_t(begin + n));
  };
}
std::map<std::string, Guess> guesses(const Ids& want) {
  return {
      {"right", oracle(want)},
      {"right, and wrong after a changing number of tokens",
       [&want](const Ids& t, int64_t most) {
         Ids draft = oracle(want)(t, most);
         const size_t wrong = t.size() % 5;
         if (wrong < draft.size()) draft[wrong] = (draft[wrong] + 1) % kVocab;
         return draft;
       }},
      {"shifted by one",
       [&want](const Ids& t, int64_t most) {
         Ids draft = oracle(want)(t, most + 1);
         if (!draft.empty()) draft.erase(draft.begin());
         return draft;
       }},
      {"random", [](const Ids& t, int64_t most) { return ids_of(t.size() + 99, most); }},
      {"empty", [](const Ids&, int64_t) { return Ids(); }},
      {"longer than a step takes",
       [&want](const Ids& t, int64_t) {
         Ids draft = oracle(want)(t, 40);
         draft.resize(40, 1);
         return draft;
       }},
      {"ending in a stop",
       [&want](const Ids& t, int64_t most) {
         Ids draft = oracle(want)(t, most);
         draft.push_back(kStops[0]);
         return draft;
       }},
      {"of changing length", [&want](const Ids& t, int64_t) { return oracle(want)(t, int64_t(t.size() * 5 % 8)); }},
  };
}

void expect_equal(const Outcome& found, const Outcome& want) {
  EXPECT_EQ(found.tokens, want.tokens);
  EXPECT_EQ(found.logprobs, want.logprobs);
  EXPECT_EQ(found.finish, want.finish);
  EXPECT_EQ(found.stop_id, want.stop_id);
  EXPECT_EQ(found.length, want.length);
}

TEST(DraftSteps, TheAnswerIsThatOfNoDraftsForEveryOptionAndEveryDraft) {
  const auto d = decoder();
  for (const Case& c : cases())
    for (const int64_t prompt : {1, 5, 6, 11}) {
      const Ids told = ids_of(uint64_t(prompt), prompt);
      const Outcome want = answer(*d, told, c);
      for (const auto& [name, guess] : guesses(want.tokens)) {
        SCOPED_TRACE(detail::concat(c.name, ", draft ", name, ", prompt of ", prompt));
        const Outcome found = answer(*d, told, c, guess);
        expect_equal(found, want);
        if (name == "right" && want.tokens.size() > 12) {
          EXPECT_LT(found.steps, int64_t(want.tokens.size()) / 4);
          EXPECT_GT(found.accepted, int64_t(want.tokens.size()) / 2);
        }
        if (name == "empty") EXPECT_EQ(found.drafted, 0);
      }
    }
}

TEST(DraftSteps, TheNextTurnFindsTheSlotAsStepsWithoutDraftsLeaveIt) {
  const auto d = decoder(2);
  const Case c = make_case("temperature", 1, [](Case& x) { x.tokens = 13; });
  const Ids prompt = ids_of(3, 9), next = ids_of(4, 3);
  const Ids want = answer(*d, prompt, c).tokens;
  for (const auto& [name, guess] : guesses(want)) {
    SCOPED_TRACE(name);
    Sequence a(*d), b(*d);
    feed(a, prompt), feed(b, prompt);
    a.checkpoint(), b.checkpoint();
    SampleOptions o = c.options;
    b.sample(o, 13);
    o.drafting = true;
    for (Ids t; t.size() < 13;) {
      const Ids draft = guess(t, 7);
      o.draft = draft, o.step = uint32_t(t.size());
      const Sampled s = a.sample(o, 13 - int64_t(t.size()));
      t.insert(t.end(), s.tokens.begin(), s.tokens.end());
    }
    ASSERT_EQ(a.length(), b.length());
    std::vector<double> rows[2];
    for (Sequence* s : {&a, &b})
      s->extend(next, Decoder::Rows::all,
                [&](int64_t, const Tensor& logits) { rows[s == &b] = testing::values(logits); });
    EXPECT_EQ(rows[0], rows[1]);
    for (const int64_t length : {int64_t(20), int64_t(9)}) EXPECT_EQ(a.rewind(length), b.rewind(length));
  }
}

TEST(DraftSteps, KeysThatComeBackIntoTheWindowAfterTruncationAreStillThere) {
  // The window of 6 keys has passed them by when the whole draft is in the cache.
  const auto d = decoder();
  const Case c = make_case("greedy", 0, [](Case& x) { x.tokens = 30; });
  const Ids prompt = ids_of(7, 7);
  const Outcome want = answer(*d, prompt, c);
  const Guess wrong = [](const Ids& t, int64_t most) { return ids_of(t.size() + 5, most); };
  const Outcome found = answer(*d, prompt, c, wrong);
  expect_equal(found, want);
  EXPECT_GT(found.drafted, 100);
}

TEST(DraftSteps, AStopIdInsideTheDraftEndsTheAnswerAndTheTokensAfterItAreGone) {
  const auto d = decoder();
  Case c = make_case("greedy", 0);
  const Ids prompt = ids_of(2, 6), free = answer(*d, prompt, c).tokens;
  for (size_t at = 1; at < 9; ++at) {
    const int32_t stop[] = {free[at]};
    c.options.stop_ids = stop;
    const Outcome want = answer(*d, prompt, c), found = answer(*d, prompt, c, oracle(free));
    expect_equal(found, want);
    EXPECT_EQ(found.stop_id, free[at]);
    EXPECT_EQ(found.length, 6 + int64_t(found.tokens.size()));
    EXPECT_LE(found.accepted, int64_t(found.tokens.size())) << "a stop id is no accepted token";
  }
}

TEST(DraftSteps, OnTokenEndsTheAnswerInTheMiddleOfAnAcceptedDraft) {
  const auto d = decoder();
  const Case c = make_case("greedy", 0);
  const Ids prompt = ids_of(2, 6), free = answer(*d, prompt, c).tokens;
  for (size_t last = 1; last < 10; ++last) {
    Case ends = c;
    Ids seen;
    ends.options.on_token = [&](int32_t id) {
      seen.push_back(id);
      return seen.size() <= last;
    };
    const Outcome found = answer(*d, prompt, ends, oracle(free));
    EXPECT_EQ(found.finish, Finish::cancelled);
    EXPECT_EQ(found.tokens, Ids(free.begin(), free.begin() + int64_t(last) + 1));
    EXPECT_EQ(seen, found.tokens);
    EXPECT_EQ(found.length, 6 + int64_t(last)) << "the last token is pending";
  }
}

TEST(DraftSteps, ACancelBetweenTwoAcceptedTokensEndsTheAnswerThere) {
  const auto d = decoder();
  const Case c = make_case("greedy", 0);
  const Ids prompt = ids_of(2, 6), free = answer(*d, prompt, c).tokens;
  Case cancels = c;
  int seen = 0;
  cancels.options.on_token = [&](int32_t) {
    if (++seen == 4) d->cancel(0);
    return true;
  };
  const Outcome found = answer(*d, prompt, cancels, oracle(free));
  EXPECT_EQ(found.finish, Finish::cancelled);
  EXPECT_EQ(found.tokens, Ids(free.begin(), free.begin() + 4));
  EXPECT_EQ(found.length, 6 + 3);
}

TEST(DraftSteps, PenaltiesCountTheTokensOfTheDraft) {
  const auto d = decoder();
  const Case c = make_case("penalties", 0, [](Case& x) { x.penalty = 8; });
  const Ids prompt = ids_of(5, 8);
  const Outcome want = answer(*d, prompt, c);
  const Outcome found = answer(*d, prompt, c, oracle(want.tokens));
  expect_equal(found, want);
  EXPECT_GT(found.accepted, 10);
  EXPECT_NE(answer(*d, prompt, make_case("greedy", 0)).tokens, want.tokens) << "the penalties matter";
}

TEST(DraftSteps, BiasesAndFiltersActOnEveryRowAndNotOnTheLastAlone) {
  const auto d = decoder();
  const Case c = make_case("forbidden", 1.5, [](Case& x) {
    static const LogitBias never[] = {{1, -HUGE_VALF}, {2, -HUGE_VALF}, {8, -HUGE_VALF}};
    x.options.bias = never;
    x.options.sampling.min_p = 0.2;
  });
  const Ids prompt = ids_of(5, 8);
  // A draft of forbidden tokens is never accepted.
  const Outcome found = answer(*d, prompt, c, [](const Ids&, int64_t) { return Ids{1, 2, 8, 1}; });
  EXPECT_EQ(found.accepted, 0);
  expect_equal(found, answer(*d, prompt, c));
}

TEST(DraftSteps, TokensOverEightIdsAreDistributedAsTheirProbabilities) {
  // Two tokens after one prompt, by many seeds; the draft is the likeliest pair.
  const auto d = decoder();
  const Ids prompt = ids_of(12, 6);
  const Case c = make_case("eight ids", 1.2, [](Case& x) { x.options.vocab = 8, x.tokens = 3; });
  Sequence s(*d);
  const auto probabilities = [&](const Ids& before) {
    s.rewind(0);
    Ids all = prompt;
    all.insert(all.end(), before.begin(), before.end());
    std::vector<double> p(8);
    for (size_t i = 0; i < all.size(); ++i)
      s.extend(std::span(all).subspan(i, 1), Decoder::Rows::last, [&](int64_t, const Tensor& logits) {
        double sum = 0;
        const std::vector<double> row = testing::values(logits);
        for (size_t id = 0; id < 8; ++id) sum += p[id] = std::exp(row[id] / 1.2);
        for (double& x : p) x /= sum;
      });
    return p;
  };
  // A mask makes the first token pending; the second and third come from a step with a draft.
  const std::vector<double> first = probabilities({});
  const int32_t start = int32_t(std::max_element(first.begin(), first.end()) - first.begin());
  const std::vector<double> second = probabilities({start});
  const int32_t draft[] = {int32_t(std::max_element(second.begin(), second.end()) - second.begin())};
  constexpr int kSeeds = 5000;
  std::vector<double> expected(64), found(64);
  for (int32_t a = 0; a < 8; ++a) {
    const std::vector<double> third = probabilities({start, a});
    for (int32_t b = 0; b < 8; ++b) expected[size_t(a * 8 + b)] = second[size_t(a)] * third[size_t(b)] * kSeeds;
  }
  s.rewind(0);
  feed(s, prompt);
  const uint32_t only_start[] = {1u << start};
  int64_t accepted = 0;
  for (int seed = 0; seed < kSeeds; ++seed) {
    SampleOptions o = c.options;
    o.seed = uint64_t(seed) * 977, o.drafting = true, o.allowed = only_start;
    s.rewind(5);
    s.extend(std::span(prompt).last(1));
    s.sample(o, 1);
    o.step = 1, o.allowed = {}, o.draft = draft;
    const Sampled step = s.sample(o, 2);
    accepted += step.accepted;
    Ids t = step.tokens;
    o.step = 2, o.draft = {};
    if (t.size() == 1) t.push_back(s.sample(o, 1).tokens[0]);
    ++found[size_t(t[0] * 8 + t[1])];
  }
  EXPECT_GT(accepted, kSeeds / 8);
  double chi = 0;
  int cells = 0;
  for (size_t i = 0; i < 64; ++i)
    if (expected[i] >= 5) chi += (found[i] - expected[i]) * (found[i] - expected[i]) / expected[i], ++cells;
  EXPECT_GT(cells, 8);
  EXPECT_LT(chi, cells + 4 * std::sqrt(2.0 * cells));
}

TEST(DraftSteps, WrongOptionsAreRefusedBeforeAnythingChanges) {
  const auto d = decoder();
  Sequence s(*d);
  feed(s, ids_of(1, 4));
  SampleOptions o{.sampling = {.temperature = 0}};
  o.drafting = true;
  s.sample(o, 1);
  const int32_t wide[] = {kVocab}, two[] = {1, 2};
  const DraftRow one[1];
  o.draft = wide;
  EXPECT_NE(error_of([&] { s.sample(o, 8); }).find("found id 37 in a draft"), std::string::npos);
  o.draft = two, o.draft_rows = one;
  EXPECT_NE(error_of([&] { s.sample(o, 8); }).find("found 1 rows for a draft of 2"), std::string::npos);
  const uint32_t nothing[] = {0, 0};
  const DraftRow rows[] = {{.allowed = nothing}, {}};
  o.draft_rows = rows;
  EXPECT_NE(error_of([&] { s.sample(o, 8); }).find("no token that is allowed"), std::string::npos);
  EXPECT_EQ(s.length(), 4);
  o.draft_rows = {};
  EXPECT_GE(s.sample(o, 8).tokens.size(), 1u) << "the pending token is still there";
  const auto narrow = decoder(1, 1);
  EXPECT_EQ(narrow->draft_rows(), 1);
  Sequence n(*narrow);
  const int32_t id[] = {1};
  n.extend(id);
  EXPECT_NE(error_of([&] { n.sample(o, 8); }).find("this engine computes no drafts"), std::string::npos);
}

TEST(StepCosts, AreMeasuredForEveryNumberOfRowsAndLeaveTheSlotEmpty) {
  const auto d = decoder();
  Sequence s(*d);
  const draft::StepCosts costs = draft::measure_step_costs(*d, s.slot(), 5);
  EXPECT_EQ(costs.most_rows(), 6);
  for (int64_t k = 2; k <= 6; ++k) EXPECT_GE(costs(k), costs(k - 1));
  EXPECT_EQ(s.length(), 0);
  EXPECT_EQ(draft::measure_step_costs(*d, s.slot(), 100).most_rows(), 8);
}

}  // namespace
}  // namespace ingot
