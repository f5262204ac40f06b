// Draft steps of Decoder::sample(), on the CPU and on a GPU: whatever the draft, the tokens are those of steps without
// drafts.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>

#include "ingot/gpu/device.h"
#include "ingot/models/decode/cpu/decoder.h"
#include "ingot/models/decode/model/decoder.h"
#include "ingot/models/decoder.h"
#include "ingot/models/draft/answer_drafts.h"
#include "ingot/models/draft/lookup.h"
#include "ingot/models/gpt_oss/random_model.test.h"
#include "ingot/models/host_sampling.h"
#include "ingot/testing/gpu_test.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::error_of;
using Ids = std::vector<int32_t>;
constexpr int64_t kVocab = 37, kContext = 64;

using Model = testing::RandomGptOss;  // whose window drafts cross
enum class Where { cpu, gpu };
class DraftSteps : public ::testing::TestWithParam<Where> {
 protected:
  void SetUp() override {
    if (on_gpu() && gpu::device_count() == 0) GTEST_SKIP() << "no GPU";
    if (on_gpu() && decoder()->draft_rows() == 1) GTEST_SKIP() << "an SM's memory has no room for draft steps";
  }
  static bool on_gpu() { return GetParam() == Where::gpu; }
  static bool emulated() { return on_gpu() && testing::kEmulated; }
  // Where answers share steps, `together`.
  static std::unique_ptr<Decoder> decoder(int64_t slots = 1, int64_t batch = 8, bool together = false) {
    static const Model m;
    const DecoderOptions o{.context = kContext, .batch = batch, .slots = slots, .batched_sequences = together};
    return on_gpu() ? make_gpu_decoder(m.config, m.weights, o) : make_decoder(m.config, m.weights, o);
  }
};
std::vector<Where> places() {
#ifdef INGOT_HAS_CUDA_DECODE
  return {Where::cpu, Where::gpu};
#else
  return {Where::cpu};
#endif
}
INSTANTIATE_TEST_SUITE_P(engines, DraftSteps, ::testing::ValuesIn(places()),
                         [](const auto& info) { return std::string(info.param == Where::gpu ? "gpu" : "cpu"); });

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
      make_case("logprobs up to a stop id", 2, [](Case& c) { c.options.logprobs = 2, c.options.stop_ids = kStops; }),
      make_case("penalties", 1, [](Case& c) { c.penalty = 1.5; }),
      make_case("a mask that changes with every token", 1.5,
                [](Case& c) { c.rule = [](const Ids& t, int32_t id) { return (size_t(id) + t.size()) % 3 != 0; }; }),
      make_case("all options at once", 1.5,
                [](Case& c) {
                  c.options.sampling.top_k = 20, c.options.sampling.top_p = 0.9, c.options.sampling.min_p = 0.01;
                  c.options.bias = kBias, c.options.vocab = 34, c.options.logprobs = 1;
                  c.options.stop_ids = {kStops, 1};
                  c.penalty = 0.5;
                  c.rule = [](const Ids& t, int32_t id) { return (size_t(id) + t.size()) % 5 != 0; };
                }),
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

// An answer under way; with `guess` by draft steps, else token by token as without drafts.
class Running {
 public:
  Running(Decoder& d, const Ids& prompt, const Case& c, const Guess& guess, int64_t most)
      : sequence_(d), case_(c), guess_(guess), most_(most) {
    feed(sequence_, prompt);
  }
  int slot() const { return sequence_.slot(); }
  bool ended() const { return ended_; }
  int64_t tokens_of_step() const { return guess_ ? case_.tokens - int64_t(all_.tokens.size()) : 1; }
  // Of the next step; valid until the step after.
  SampleOptions options() {
    SampleOptions o = case_.options;
    o.step += uint32_t(all_.tokens.size());
    choices_.clear(), rows_.clear(), draft_.clear();
    choices_.emplace_back(case_, all_.tokens);
    if (guess_) {
      o.drafting = true;
      draft_ = guess_(all_.tokens, most_);
      Ids then = all_.tokens;
      for (size_t i = 0; i < draft_.size(); ++i) {
        if (case_.rule && !case_.rule(then, draft_[i])) draft_.resize(i);  // a draft ends at its first forbidden token
        if (i == draft_.size()) break;
        then.push_back(draft_[i]);
        choices_.emplace_back(case_, then);
      }
      for (size_t i = 1; i < choices_.size(); ++i) rows_.push_back({choices_[i].bias, choices_[i].allowed});
      o.draft = draft_, o.draft_rows = rows_;
    }
    o.bias = choices_[0].bias, o.allowed = choices_[0].allowed;
    return o;
  }
  void take(const Sampled& step) {
    EXPECT_LE(step.accepted, step.drafted);
    EXPECT_LE(step.drafted, int64_t(draft_.size()));
    all_.tokens.insert(all_.tokens.end(), step.tokens.begin(), step.tokens.end());
    for (const TokenLogprobs& p : step.logprobs) {
      all_.logprobs.push_back(p.sampled);
      for (const TokenLogprob& top : p.top) all_.logprobs.push_back(top.logprob + 1000 * top.id);
    }
    all_.finish = step.finish, all_.stop_id = step.stop_id;
    all_.drafted += step.drafted, all_.accepted += step.accepted, ++all_.steps;
    ended_ = step.finish != Finish::length || int64_t(all_.tokens.size()) >= case_.tokens;
    all_.length = sequence_.length();
  }
  Sampled sample() { return sequence_.sample(options(), tokens_of_step()); }
  const Outcome& outcome() const { return all_; }

 private:
  Sequence sequence_;
  Case case_;
  Guess guess_;
  int64_t most_;
  Outcome all_;
  bool ended_ = false;
  std::vector<Choice> choices_;  // of the next token, then of the tokens after the draft's
  std::vector<DraftRow> rows_;
  Ids draft_;
};
Outcome answer(Decoder& d, const Ids& prompt, const Case& c, const Guess& guess = {}, int64_t most = 7) {
  Running r(d, prompt, c, guess, most);
  while (!r.ended()) r.take(r.sample());
  return r.outcome();
}

// The answer that drafts must not change. On a GPU all steps of a drafted answer take the path of several rows.
Outcome plain(Decoder& d, const Ids& prompt, const Case& c) {
  if (d.device().kind == Device::cpu) return answer(d, prompt, c);
  return answer(d, prompt, c, [](const Ids&, int64_t) { return Ids(); });
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

TEST_P(DraftSteps, TheAnswerIsThatOfNoDraftsForEveryOptionAndEveryDraft) {
  const auto d = decoder();
  std::vector<Case> all = cases();
  for (size_t i = 0; i < all.size(); ++i)
    for (const int64_t prompt : emulated() ? std::vector<int64_t>{5} : std::vector<int64_t>{1, 5, 6, 11}) {
      Case& c = all[i];
      if (emulated() && c.tokens < 100) c.tokens = std::min<int64_t>(c.tokens, 12);
      const Ids told = ids_of(uint64_t(prompt), prompt);
      const Outcome want = plain(*d, told, c);
      size_t turn = i;
      for (const auto& [name, guess] : guesses(want.tokens)) {
        if (emulated() && turn++ % 4 != 0) continue;  // every draft meets some options, and every option two drafts
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

TEST_P(DraftSteps, TheNextTurnFindsTheSlotAsStepsWithoutDraftsLeaveIt) {
  const auto d = decoder(2);
  const Case c = make_case("temperature", 1, [](Case& x) { x.tokens = 13; });
  const Ids prompt = ids_of(3, 9), next = ids_of(4, 3);
  const Ids want = plain(*d, prompt, c).tokens;
  const auto take = [&](Sequence& s, const Guess& guess) {
    SampleOptions o = c.options;
    o.drafting = true;
    for (Ids t; t.size() < 13;) {
      const Ids draft = guess(t, 7);
      o.draft = draft, o.step = uint32_t(t.size());
      const Sampled sampled = s.sample(o, 13 - int64_t(t.size()));
      t.insert(t.end(), sampled.tokens.begin(), sampled.tokens.end());
    }
  };
  for (const auto& [name, guess] : guesses(want)) {
    if (emulated() && name[0] != 'r') continue;  // right, and wrong after a changing number of tokens; random
    SCOPED_TRACE(name);
    Sequence a(*d), b(*d);
    feed(a, prompt), feed(b, prompt);
    a.checkpoint(), b.checkpoint();
    take(a, guess);
    if (on_gpu())
      take(b, [](const Ids&, int64_t) { return Ids(); });
    else
      b.sample(c.options, 13);
    ASSERT_EQ(a.length(), b.length());
    std::vector<double> rows[2];
    for (Sequence* s : {&a, &b})
      s->extend(next, Decoder::Rows::all,
                [&](int64_t, const Tensor& logits) { rows[s == &b] = testing::values(logits); });
    EXPECT_EQ(rows[0], rows[1]);
    for (const int64_t length : {20, 9}) EXPECT_EQ(a.rewind(length), b.rewind(length));
  }
}

TEST_P(DraftSteps, KeysThatComeBackIntoTheWindowAfterTruncationAreStillThere) {
  // While the whole draft is in the cache, these keys are older than the window of 6 keys.
  const auto d = decoder();
  const Case c = make_case("greedy", 0, [](Case& x) { x.tokens = emulated() ? 12 : 30; });
  const Ids prompt = ids_of(7, 7);
  const Outcome want = plain(*d, prompt, c);
  const Guess wrong = [](const Ids& t, int64_t most) { return ids_of(t.size() + 5, most); };
  const Outcome found = answer(*d, prompt, c, wrong);
  expect_equal(found, want);
  EXPECT_GT(found.drafted, 3 * c.tokens);
}

TEST_P(DraftSteps, AStopIdInsideTheDraftEndsTheAnswerAndTheTokensAfterItAreGone) {
  const auto d = decoder();
  Case c = make_case("greedy", 0, [](Case& x) { x.tokens = 12; });
  const Ids prompt = ids_of(2, 6), free = plain(*d, prompt, c).tokens;
  for (size_t at = 1; at < 9; at += emulated() ? 3 : 1) {
    const int32_t stop[] = {free[at]};
    c.options.stop_ids = stop;
    const Outcome want = plain(*d, prompt, c), found = answer(*d, prompt, c, oracle(free));
    expect_equal(found, want);
    EXPECT_EQ(found.stop_id, free[at]);
    EXPECT_EQ(found.length, 6 + int64_t(found.tokens.size()));
    // The first token has no draft, all others are drafted and, where a step has room for them, come from one step.
    const int64_t drafted = std::max<int64_t>(0, int64_t(found.tokens.size()) - 1);
    EXPECT_LE(found.accepted, drafted) << "a stop id is no accepted token";
    if (d->draft_rows() >= 8) { EXPECT_EQ(found.accepted, drafted); }
  }
}

TEST_P(DraftSteps, OnTokenEndsTheAnswerInTheMiddleOfAnAcceptedDraft) {
  const auto d = decoder();
  const Case c = make_case("greedy", 0, [](Case& x) { x.tokens = 12; });
  const Ids prompt = ids_of(2, 6), free = plain(*d, prompt, c).tokens;
  for (size_t last = 1; last < 10; last += emulated() ? 3 : 1) {
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

TEST_P(DraftSteps, ACancelBetweenTwoAcceptedTokensEndsTheAnswerThere) {
  const auto d = decoder();
  const Case c = make_case("greedy", 0, [](Case& x) { x.tokens = 12; });
  const Ids prompt = ids_of(2, 6), free = plain(*d, prompt, c).tokens;
  for (const int last : {2, 4}) {  // the first token of a draft step, and a later one
    Case cancels = c;
    int seen = 0;
    cancels.options.on_token = [&](int32_t) {
      if (++seen == last) d->cancel(0);
      return true;
    };
    const Outcome found = answer(*d, prompt, cancels, oracle(free));
    EXPECT_EQ(found.finish, Finish::cancelled);
    EXPECT_EQ(found.tokens, Ids(free.begin(), free.begin() + last));
    EXPECT_EQ(found.length, 6 + last - 1);
  }
}

TEST_P(DraftSteps, PenaltiesCountTheTokensOfTheDraft) {
  const auto d = decoder();
  const Case c = make_case("penalties", 0, [](Case& x) { x.penalty = 8, x.tokens = 14; });
  const Ids prompt = ids_of(5, 8);
  const Outcome want = plain(*d, prompt, c);
  const Outcome found = answer(*d, prompt, c, oracle(want.tokens));
  expect_equal(found, want);
  EXPECT_GT(found.accepted, 10);
  EXPECT_NE(plain(*d, prompt, make_case("greedy", 0, [](Case& x) { x.tokens = 14; })).tokens, want.tokens)
      << "the penalties matter";
}

TEST_P(DraftSteps, BiasesAndFiltersActOnEveryRowAndNotOnTheLastAlone) {
  const auto d = decoder();
  const Case c = make_case("forbidden", 1.5, [](Case& x) {
    static const LogitBias never[] = {{1, -HUGE_VALF}, {2, -HUGE_VALF}, {8, -HUGE_VALF}};
    x.options.bias = never;
    x.options.sampling.min_p = 0.2;
    x.tokens = 12;
  });
  const Ids prompt = ids_of(5, 8);
  // A draft of forbidden tokens is never accepted.
  const Outcome found = answer(*d, prompt, c, [](const Ids&, int64_t) { return Ids{1, 2, 8, 1}; });
  EXPECT_EQ(found.accepted, 0);
  expect_equal(found, plain(*d, prompt, c));
}

TEST_P(DraftSteps, TokensOverEightIdsAreDistributedAsTheirProbabilities) {
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
  const int seeds = emulated() ? 60 : 5000;
  std::vector<double> expected(64), found(64);
  for (int32_t a = 0; a < 8; ++a) {
    const std::vector<double> third = probabilities({start, a});
    for (int32_t b = 0; b < 8; ++b) expected[size_t(a * 8 + b)] = second[size_t(a)] * third[size_t(b)] * seeds;
  }
  s.rewind(0);
  feed(s, prompt);
  const uint32_t only_start[] = {1u << start};
  int64_t accepted = 0;
  for (int seed = 0; seed < seeds; ++seed) {
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
  EXPECT_GT(accepted, seeds / 8);
  double chi = 0;
  int cells = 0;
  for (size_t i = 0; i < 64; ++i)
    if (expected[i] >= 5) chi += (found[i] - expected[i]) * (found[i] - expected[i]) / expected[i], ++cells;
  EXPECT_GT(cells, emulated() ? 1 : 8);
  EXPECT_LT(chi, cells + 4 * std::sqrt(2.0 * cells));
}

TEST_P(DraftSteps, AnswersSideBySideAreThoseOfAnswersAlone) {
  const auto d = decoder(4, 8, true);
  std::vector<Case> some;
  for (const Case& c : cases())
    if (c.tokens == 24 && c.options.sampling.temperature <= 1) some.push_back(c);
  std::vector<Ids> prompts;
  std::vector<Outcome> want;
  for (size_t i = 0; i < some.size(); ++i) {
    if (emulated()) some[i].tokens = 10;
    prompts.push_back(ids_of(i, 5 + int64_t(i)));
    want.push_back(plain(*d, prompts[i], some[i]));
  }
  // Drafts of all lengths, so that steps of 2 to 8 rows hold the rows of one to four answers.
  const auto some_drafts = [&](size_t i, int64_t most) {
    return [&want, i, most](const Ids& t, int64_t) {
      Ids draft = oracle(want[i].tokens)(t, int64_t((t.size() * 3 + i) % size_t(most + 1)));
      if (t.size() % 4 == 3 && draft.size() > 1) draft[1] = (draft[1] + 1) % kVocab;
      return draft;
    };
  };
  for (const int64_t most : {1, 3, 7})
    for (size_t first = 0; first + 4 <= some.size(); first += 2) {
      SCOPED_TRACE(detail::concat("from ", some[first].name, ", drafts of at most ", most));
      std::vector<Running> running;
      running.reserve(4);
      for (size_t i = first; i < first + 4; ++i)
        running.emplace_back(*d, prompts[i], some[i], some_drafts(i, most), most);
      while (true) {
        std::vector<Decoder::Request> requests;
        std::vector<Running*> of;
        for (Running& r : running)
          if (!r.ended())
            of.push_back(&r), requests.push_back({.slot = r.slot(), .options = r.options(), .n = r.tokens_of_step()});
        if (of.empty()) break;
        const std::vector<Sampled> steps = d->sample(requests);
        for (size_t i = 0; i < of.size(); ++i) {
          ASSERT_EQ(steps[i].error, nullptr);
          of[i]->take(steps[i]);
        }
      }
      for (size_t i = 0; i < 4; ++i) expect_equal(running[i].outcome(), want[first + i]);
      EXPECT_GT(running[0].outcome().accepted, 0);
    }
}

TEST_P(DraftSteps, OptionsThatAGpuDoesNotSampleAreSampledOnTheHost) {
  // More biases than a GPU takes, in all rows and in the rows after some tokens alone.
  const auto d = decoder();
  std::vector<LogitBias> many(1030, {6, 0.001f});
  Case c = make_case("many biases", 1, [&](Case& x) { x.options.bias = many, x.tokens = 12; });
  const Ids prompt = ids_of(5, 8);
  const Outcome want = plain(*d, prompt, c);
  const Guess right = oracle(want.tokens);
  const Guess wrong = [&](const Ids& t, int64_t most) {
    Ids draft = right(t, most);
    if (draft.size() > 2) draft[2] = (draft[2] + 1) % kVocab;
    return draft;
  };
  expect_equal(answer(*d, prompt, c, right), want);
  expect_equal(answer(*d, prompt, c, wrong), want);
  many.resize(1020);  // the penalties of later tokens add more
  c.options.bias = many, c.penalty = 1, c.tokens = 14;
  const Outcome later = plain(*d, prompt, c);
  const Outcome found = answer(*d, prompt, c, oracle(later.tokens));
  expect_equal(found, later);
  EXPECT_GT(found.accepted, 8);
}

TEST_P(DraftSteps, WrongOptionsAreRefusedBeforeAnythingChanges) {
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
  if (on_gpu()) return;  // whose steps do not depend on the batch
  const auto narrow = decoder(1, 1);
  EXPECT_EQ(narrow->draft_rows(), 1);
  Sequence n(*narrow);
  const int32_t id[] = {1};
  n.extend(id);
  EXPECT_NE(error_of([&] { n.sample(o, 8); }).find("this engine computes no drafts"), std::string::npos);
}

TEST_P(DraftSteps, CostsAreMeasuredForEveryNumberOfRowsAndLeaveTheSlotEmpty) {
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
