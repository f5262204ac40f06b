#include "ingot/engines/generate/session.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ingot/engines/generate/sequence_losses.h"
#include "ingot/models/decode/cpu/decoder.h"
#include "ingot/models/decode/model/decoder.h"
#include "ingot/models/fake_decoder.test.h"
#include "ingot/models/gpt_oss/random_model.test.h"
#include "ingot/testing/gpu_test.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::error_of;

// A small GPT-OSS with a window of 6, so that short sequences exceed the window.
struct Fixture : testing::RandomGptOss {
  std::unique_ptr<Decoder> decoder(int64_t context = 200, int64_t batch = 8, int64_t slots = 1) const {
    return make_decoder(config, weights, {.context = context, .batch = batch, .slots = slots});
  }
};
std::vector<int32_t> ids_of(uint64_t seed, int64_t n) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  testing::fill_ids(Tensor(ids.data(), {n}), seed, 37);
  return ids;
}
const SessionOptions kGreedy{.tokens = 12, .sampling = {.temperature = 0}};
std::vector<int32_t> join(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Drafts at a price that always pays.
draft::Options cheap_drafts() {
  return {.make = draft::make_lookup, .most = 7, .step_costs = {1, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07}};
}

TEST(session, drafts_change_no_answer_and_repeated_text_is_accepted) {
  const Fixture f;
  int64_t accepted = 0;
  for (const double temperature : {0.0, 0.3, 1.0})
    for (const uint64_t seed : {1, 2, 3})
      for (const bool slide : {false, true}) {
        SessionOptions o{.tokens = 70, .sampling = {.temperature = temperature}, .seed = seed};
        o.slide = slide;
        o.logprobs = 1;
        const auto decoder = f.decoder(slide ? 24 : 200), other = f.decoder(slide ? 24 : 200);
        Session plain(*decoder), drafting(*other);
        std::vector<int32_t> prompt = ids_of(seed, 9);
        for (int turn = 0; turn < 3; ++turn) {
          const Answer want = plain.generate(prompt, o);
          SessionOptions drafts = o;
          drafts.draft = cheap_drafts();
          drafts.draft.exact = turn == 1;
          const Answer found = drafting.generate(prompt, drafts);
          EXPECT_EQ(found.tokens, want.tokens);
          EXPECT_EQ(found.finish, want.finish);
          EXPECT_EQ(found.reused, want.reused);
          EXPECT_EQ(plain.fed(), drafting.fed());
          ASSERT_EQ(found.logprobs.size(), want.logprobs.size());
          for (size_t i = 0; i < want.logprobs.size(); ++i)
            EXPECT_EQ(found.logprobs[i].sampled, want.logprobs[i].sampled);
          accepted += found.drafts.accepted;
          if (slide) break;
          prompt = join(join(prompt, want.tokens), {1, 2});
          prompt.resize(std::min<size_t>(prompt.size(), 100));
        }
      }
  EXPECT_GT(accepted, 100);
}

// Counts the tokens 0, 1, 2, ..., and records the rows of its draft steps, and 0 for each token without a draft step.
class Counter final : public testing::FakeDecoder {
 public:
  explicit Counter(int64_t context = 1000) : FakeDecoder({.vocab = 100, .context = context}) {}
  int64_t draft_rows() const override { return 4; }
  std::vector<int64_t> steps;

 private:
  // Appends the ids and gives the logits after the last of them.
  void count(int slot, std::span<const int32_t> ids, const Take& take) {
    append_ids(slot, ids);
    std::vector<float> logits(size_t(vocab()), 0.f);
    logits[size_t(ids.back() + 1) % logits.size()] = 50;
    take(int64_t(fed(slot).size()) - 1, Tensor(logits.data(), {1, vocab()}));
  }
  void extend_slot(int slot, std::span<const int32_t> ids, Rows, const Take& take) override {
    count(slot, ids, take);
    steps.push_back(0);
  }
  void extend_draft(int slot, std::span<const int32_t> ids, const Take& take) override {
    for (const int32_t& id : ids) count(slot, {&id, 1}, take);
    steps.push_back(int64_t(ids.size()));
  }
};

TEST(session, only_exact_drafts_take_draft_steps_without_a_draft) {
  // Knows the token after every fourth token.
  class Fourth final : public draft::Drafter {
   public:
    void append(std::span<const int32_t> ids) override { text_.insert(text_.end(), ids.begin(), ids.end()); }
    void truncate(int64_t length) override { text_.resize(size_t(length)); }
    int64_t length() const override { return int64_t(text_.size()); }
    draft::Draft draft(int64_t most) const override {
      if (text_.back() % 4 != 0 || most == 0) return {};
      return {.tokens = {text_.back() + 1}};
    }

   private:
    std::vector<int32_t> text_;
  };
  for (const bool exact : {false, true}) {
    SessionOptions o{.tokens = 10, .sampling = {.temperature = 0}};
    o.draft.make = [](std::vector<int32_t>) { return std::make_unique<Fourth>(); };
    o.draft.step_costs = {1, 1, 1, 1}, o.draft.exact = exact;
    Counter counter;
    Session session(counter);
    const Answer found = session.generate(std::vector<int32_t>{1, 2}, o);
    EXPECT_EQ(found.tokens, (std::vector<int32_t>{3, 4, 5, 6, 7, 8, 9, 10, 11, 12}));
    EXPECT_EQ(found.drafts.accepted, 2);
    // The prompt gives 3, then 4; 5 and 6; 7; 8; 9 and 10; 11; 12.
    const int64_t alone = exact ? 1 : 0;
    EXPECT_EQ(counter.steps, (std::vector<int64_t>{0, alone, 2, alone, alone, 2, alone, alone})) << exact;
  }
}

#ifdef INGOT_HAS_CUDA_DECODE
// On a GPU the answer is that of draft steps without guesses.
TEST(session, drafts_of_a_gpu_change_no_answer_of_several_turns) {
  if (gpu::device_count() == 0) GTEST_SKIP() << "no GPU";
  class NoGuess final : public draft::Drafter {
   public:
    void append(std::span<const int32_t> ids) override { length_ += int64_t(ids.size()); }
    void truncate(int64_t length) override { length_ = length; }
    int64_t length() const override { return length_; }
    draft::Draft draft(int64_t) const override { return {}; }

   private:
    int64_t length_ = 0;
  };
  const Fixture f;
  int64_t accepted = 0;
  for (const bool slide : {false, true}) {
    const DecoderOptions options{.context = slide ? 24 : 64, .batch = 8};
    const auto decoder = make_gpu_decoder(f.config, f.weights, options),
               other = make_gpu_decoder(f.config, f.weights, options);
    if (decoder->draft_rows() == 1) GTEST_SKIP() << "an SM's memory has no room for draft steps";
    Session without(*decoder), with(*other);
    SessionOptions o{.tokens = 16, .sampling = {.temperature = 0.3}, .seed = 2};
    o.slide = slide, o.logprobs = 1, o.draft = cheap_drafts(), o.draft.exact = true;
    SessionOptions none = o;
    none.draft.make = [](std::vector<int32_t>) { return std::make_unique<NoGuess>(); };
    std::vector<int32_t> prompt = join(ids_of(2, 5), ids_of(2, 5));
    for (int turn = 0; turn < 2; ++turn) {
      const Answer want = without.generate(prompt, none);
      // The answer is predicted, but for one token. The end of the prompt finds the place.
      std::vector<int32_t> text = join({prompt.end() - 4, prompt.end()}, want.tokens);
      text[10] = (text[10] + 1) % 37;
      o.draft.make = [&](std::vector<int32_t>) { return draft::make_lookup(text); };
      const Answer found = with.generate(prompt, o);
      EXPECT_EQ(found.tokens, want.tokens);
      EXPECT_EQ(found.finish, want.finish);
      EXPECT_EQ(found.reused, want.reused);
      ASSERT_EQ(found.logprobs.size(), want.logprobs.size());
      for (size_t i = 0; i < want.logprobs.size(); ++i)
        EXPECT_EQ(found.logprobs[i].sampled, want.logprobs[i].sampled) << "token " << i;
      EXPECT_EQ(want.drafts.tokens, 0);
      accepted += found.drafts.accepted;
      if (slide) break;
      prompt = join(join(prompt, want.tokens), {1, 2});
    }
  }
  EXPECT_GT(accepted, 12);
}
// Steps whose drafts the policy refuses are those of no drafts, also where the GPU begins the next token early.
TEST(session, refused_drafts_of_a_gpu_leave_the_answer_of_no_drafts) {
  if (gpu::device_count() == 0) GTEST_SKIP() << "no GPU";
  const Fixture f;
  const auto decoder = make_gpu_decoder(f.config, f.weights, {.context = 64, .batch = 8}),
             other = make_gpu_decoder(f.config, f.weights, {.context = 64, .batch = 8});
  Session without(*decoder), with(*other);
  std::vector<int32_t> prompt = join(ids_of(2, 5), ids_of(2, 5));
  for (int turn = 0; turn < 2; ++turn) {
    SessionOptions o{.tokens = 14, .sampling = {.temperature = turn == 0 ? 0.3 : 0}, .seed = 2};
    const Answer want = without.generate(prompt, o);
    // The answer is predicted from the end of the prompt on, and a draft costs more than it may yield.
    const std::vector<int32_t> text = join({prompt.end() - 4, prompt.end()}, want.tokens);
    o.draft.make = [&](std::vector<int32_t>) { return draft::make_lookup(text); };
    o.draft.step_costs = {1, 100, 100, 100};
    const Answer found = with.generate(prompt, o);
    EXPECT_EQ(found.tokens, want.tokens);
    EXPECT_EQ(found.reused, want.reused);
    EXPECT_EQ(found.drafts.tokens, 0);
    prompt = join(join(prompt, want.tokens), {1, 2});
  }
}
#endif

TEST(session, drafts_stop_at_the_limit_at_a_stop_id_and_where_the_caller_stops) {
  const Fixture f;
  const std::vector<int32_t> prompt = ids_of(1, 30);
  for (const int64_t limit : {1, 2, 5, 11, 40}) {
    const auto decoder = f.decoder(), other = f.decoder();
    SessionOptions o{.tokens = limit, .sampling = {.temperature = 0}};
    o.logprobs = 1;
    const Answer want = Session(*decoder).generate(prompt, o);
    o.draft = cheap_drafts();
    std::vector<int32_t> seen;
    o.on_token = [&](int32_t id) {
      seen.push_back(id);
      return true;
    };
    EXPECT_EQ(Session(*other).generate(prompt, o).tokens, want.tokens);
    EXPECT_EQ(seen, want.tokens);
    o.on_token = [&, n = int64_t(0)](int32_t) mutable { return ++n < (limit + 1) / 2; };
    const Answer cut = Session(*f.decoder()).generate(prompt, o);
    EXPECT_EQ(int64_t(cut.tokens.size()), (limit + 1) / 2);
    EXPECT_EQ(cut.finish, Finish::cancelled);
    o.on_token = {};
    o.stop_ids = {want.tokens.back()};
    const Answer stopped = Session(*f.decoder()).generate(prompt, o);
    EXPECT_EQ(stopped.finish, Finish::stop);
    EXPECT_TRUE(std::equal(stopped.tokens.begin(), stopped.tokens.end(), want.tokens.begin()));
    o.draft = {};
    const Answer alone = Session(*f.decoder()).generate(prompt, o);
    ASSERT_EQ(stopped.logprobs.size(), alone.logprobs.size()) << "a stop id has logprobs with drafts as without";
    for (size_t i = 0; i < alone.logprobs.size(); ++i)
      EXPECT_EQ(stopped.logprobs[i].sampled, alone.logprobs[i].sampled);
  }
}

TEST(session, the_costs_of_steps_are_measured_where_none_are_given) {
  const Fixture f;
  const auto decoder = f.decoder(), other = f.decoder();
  const std::vector<int32_t> prompt = ids_of(1, 30);
  const Answer want = Session(*decoder).generate(prompt, kGreedy);
  SessionOptions o = kGreedy;
  o.draft = {.make = draft::make_lookup};
  Session session(*other);
  EXPECT_EQ(session.generate(prompt, o).tokens, want.tokens);
  EXPECT_EQ(session.generate(prompt, o).reused, 29);
}

TEST(session, greedy_tokens_are_the_likeliest_after_everything_before) {
  const Fixture f;
  const auto decoder = f.decoder();
  Session session(*decoder);
  std::vector<int32_t> all = ids_of(1, 30);
  const Answer a = session.generate(all, kGreedy);
  ASSERT_EQ(a.tokens.size(), 12u);
  EXPECT_EQ(a.finish, Finish::length);
  for (const int32_t token : a.tokens) {
    const auto fresh = f.decoder();
    Sequence sequence(*fresh);
    std::vector<double> row;
    for (size_t t = 0; t < all.size(); ++t)
      sequence.extend(std::span(all).subspan(t, 1), Decoder::Rows::last,
                      [&](int64_t, const Tensor& logits) { row = testing::values(logits); });
    EXPECT_EQ(token, std::max_element(row.begin(), row.end()) - row.begin());
    all.push_back(token);
  }
}

// A session over several turns, and a second session that computes every prompt from its beginning.
struct session_turns : ::testing::Test, Fixture {
  std::unique_ptr<Decoder> decoders[2] = {decoder(), decoder()};
  Session session{*decoders[0]}, fresh{*decoders[1]};
  const std::vector<int32_t> first = ids_of(1, 60);
  // Generates the answer to `first`, long enough for the circular caches to wrap around.
  void answer_first() {
    SessionOptions long_answer = kGreedy;
    long_answer.tokens = 40;
    session.generate(first, long_answer);
  }
};

TEST_F(session_turns, a_continued_turn_reuses_the_slot_and_gives_the_same_answer) {
  const Answer a = session.generate(first, kGreedy);
  EXPECT_EQ(a.reused, 0);
  const std::vector<int32_t> second = join(join(first, a.tokens), ids_of(2, 9));
  const Answer b = session.generate(second, kGreedy);
  EXPECT_EQ(b.reused, 60 + 11);  // the last sampled token was never fed
  EXPECT_EQ(b.tokens, fresh.generate(second, kGreedy).tokens);
}

TEST_F(session_turns, a_turn_whose_answer_was_rewritten_goes_back_to_the_end_of_its_prompt) {
  answer_first();
  std::vector<int32_t> second = join(first, ids_of(3, 12));
  second[60] = session.fed()[60] == 5 ? 6 : 5;  // no token of the answer is reused
  const Answer b = session.generate(second, kGreedy);
  EXPECT_EQ(b.reused, 60);
  EXPECT_EQ(b.tokens, fresh.generate(second, kGreedy).tokens);
  // A prompt that differs from the first in its middle has no checkpoint to return to, and is computed whole.
  std::vector<int32_t> third = ids_of(1, 60);
  third[30] = (third[30] + 1) % 37;
  const Answer c = session.generate(third, kGreedy);
  EXPECT_EQ(c.reused, 0);
  fresh.forget();
  EXPECT_EQ(c.tokens, fresh.generate(third, kGreedy).tokens);
}

TEST_F(session_turns, a_turn_that_diverges_before_the_answer_keeps_the_common_beginning) {
  answer_first();
  std::vector<int32_t> second = first;
  second[57] = (second[57] + 1) % 37;
  second = join(second, ids_of(3, 12));
  const Answer b = session.generate(second, kGreedy);
  EXPECT_EQ(b.reused, 57);
  EXPECT_EQ(b.tokens, fresh.generate(second, kGreedy).tokens);
  // The checkpoint at the end of the first prompt now belongs to a different text.
  fresh.forget();
  EXPECT_EQ(session.generate(first, kGreedy).tokens, fresh.generate(first, kGreedy).tokens);
}

TEST(session, ids_beyond_the_requested_vocabulary_are_never_sampled) {
  const Fixture f;
  const auto decoder = f.decoder();
  Session session(*decoder);
  SessionOptions o{.tokens = 150, .sampling = {.temperature = 5}};
  const auto largest = [&] {
    const std::vector<int32_t> tokens = session.generate(ids_of(1, 10), o).tokens;
    return *std::max_element(tokens.begin(), tokens.end());
  };
  EXPECT_GE(largest(), 30);
  o.vocab = 20;
  EXPECT_LT(largest(), 20);
  o.vocab = 38;
  EXPECT_EQ(error_of([&] { largest(); }).substr(0, 62),
            "invalid argument: generate: found a vocabulary of 38, expected");
}

TEST(session, many_turns_keep_a_bounded_number_of_checkpoints_and_reuse_early_tokens) {
  const Fixture f;
  const auto decoder = f.decoder(400);
  Session session(*decoder);
  std::vector<int32_t> prompt = ids_of(1, 5);
  for (uint64_t turn = 0; turn < 14; ++turn) {
    prompt = join(prompt, ids_of(100 + turn, 7));
    session.generate(prompt, kGreedy);
  }
  std::vector<int32_t> early = ids_of(1, 5);  // shares only the first turn
  early = join(join(early, ids_of(100, 7)), ids_of(7, 20));
  const Answer a = session.generate(early, kGreedy);
  EXPECT_GT(a.reused, 0);
  const auto other = f.decoder(400);
  Session fresh(*other);
  EXPECT_EQ(a.tokens, fresh.generate(early, kGreedy).tokens);
}

TEST(session, ends_at_a_stop_id_at_the_context_and_when_cancelled) {
  const Fixture f;
  const auto decoder = f.decoder(40, 8, 2);
  Session session(*decoder);
  const std::vector<int32_t> prompt = ids_of(1, 30);
  const std::vector<int32_t> free = session.generate(prompt, kGreedy).tokens;
  SessionOptions o = kGreedy;
  o.stop_ids = {free[3]};
  const Answer stopped = session.generate(prompt, o);
  EXPECT_EQ(stopped.finish, Finish::stop);
  EXPECT_EQ(stopped.stop_id, free[3]);
  EXPECT_LE(stopped.tokens.size(), 3u);
  o = kGreedy;
  o.tokens = 100;
  const Answer full = session.generate(prompt, o);
  EXPECT_EQ(full.finish, Finish::context);
  EXPECT_EQ(full.tokens.size(), 11u);  // ten tokens fit, and the eleventh is sampled without being fed
  o.slide = true;
  const Answer slid = session.generate(prompt, o);
  EXPECT_EQ(slid.tokens.size(), 100u);
  // The context was full after ten tokens; the further tokens see the later half, 20 tokens.
  std::vector<int32_t> all = prompt;
  all.insert(all.end(), slid.tokens.begin(), slid.tokens.end());
  Session later(*decoder);
  const std::vector<int32_t> half(all.begin() + 21, all.begin() + 41);
  EXPECT_EQ(later.generate(half, kGreedy).tokens[0], slid.tokens[11]);
  o = kGreedy;
  int shown = 0;
  o.on_token = [&](int32_t) { return ++shown < 4; };
  const Answer ended = session.generate(prompt, o);
  EXPECT_EQ(ended.finish, Finish::cancelled);
  EXPECT_EQ(ended.tokens.size(), 4u);
  o = kGreedy;
  int asked = 0;
  o.cancelled = [&] { return ++asked > 2; };  // between batches of the prompt
  session.forget();
  const Answer cut = session.generate(prompt, o);
  EXPECT_EQ(cut.finish, Finish::cancelled);
  EXPECT_TRUE(cut.tokens.empty());
  EXPECT_EQ(session.fed().size(), 16u);
  EXPECT_EQ(session.generate(prompt, kGreedy).tokens, free);  // and continues as if it had not been cancelled
}

TEST(session, no_token_is_lost_or_doubled_where_the_context_slides) {
  Counter counter(20);
  Session session(counter);
  const Answer found =
      session.generate(std::vector<int32_t>{1, 2, 3}, {.tokens = 60, .sampling = {.temperature = 0}, .slide = true});
  ASSERT_EQ(found.tokens.size(), 60u);
  for (size_t i = 0; i < 60; ++i) EXPECT_EQ(found.tokens[i], int32_t(4 + i)) << i;
  for (size_t i = 1; i < counter.fed().size(); ++i) EXPECT_EQ(counter.fed()[i], counter.fed()[i - 1] + 1) << i;
}

TEST(session, bad_prompts_are_refused_and_leave_the_session_usable) {
  const Fixture f;
  const auto decoder = f.decoder(20);
  Session session(*decoder);
  EXPECT_EQ(error_of([&] { session.generate(ids_of(1, 21), kGreedy); }),
            "usage: found a prompt of 21 tokens, expected at most 20, the context");
  EXPECT_EQ(error_of([&] { session.generate({}, kGreedy); }),
            "usage: found an empty prompt, expected at least one token");
  const std::vector<int32_t> bad = {1, 37};
  EXPECT_EQ(error_of([&] { session.generate(bad, kGreedy); }),
            "usage: found id 37 at position 1 of the prompt, expected 0 to 36");
  EXPECT_EQ(session.generate(ids_of(1, 5), kGreedy).tokens.size(), 12u);
  EXPECT_EQ(error_of([&] { f.decoder(131073); }),
            "usage: context: found 131073, expected 1 to 131072, or 0 for the model's");
}

TEST(session, every_loss_is_the_loss_of_the_next_token) {
  const Fixture f;
  const auto decoder = f.decoder(200, 8, 2);
  const std::vector<int32_t> ids = ids_of(4, 45);
  const std::vector<double> losses = sequence_losses(*decoder, ids);
  ASSERT_EQ(losses.size(), 44u);
  Sequence sequence(*decoder);
  for (size_t t = 0; t + 1 < ids.size(); ++t) {
    std::vector<double> row;
    sequence.extend(std::span(ids).subspan(t, 1), Decoder::Rows::last,
                    [&](int64_t, const Tensor& logits) { row = testing::values(logits); });
    double sum = 0;
    for (const double l : row) sum += std::exp(l);
    EXPECT_NEAR(losses[t], std::log(sum) - row[size_t(ids[t + 1])], 1e-4) << t;  // batches of 8 sum in another order
  }
  EXPECT_TRUE(sequence_losses(*decoder, std::span(ids).first(1)).empty());
  EXPECT_TRUE(sequence_losses(*decoder, {}).empty());
  const std::vector<double> tail = sequence_losses(*decoder, ids, {}, 20);
  ASSERT_EQ(tail.size(), 25u);
  for (size_t t = 0; t < tail.size(); ++t) EXPECT_NEAR(tail[t], losses[t + 19], 1e-4) << t;
  for (const int64_t first : {0, -1})
    EXPECT_EQ(
        error_of([&] { sequence_losses(*decoder, ids, {}, first); }),
        "invalid argument: losses: found " + std::to_string(first) + " as the first scored token, expected at least 1");
  EXPECT_EQ(sequence_losses(*f.decoder(44), ids).size(), 44u);  // the last id takes no space in the context
}

TEST(session, windows_score_every_token_once_with_the_requested_context) {
  EXPECT_EQ(windows_of(8, 3, 0), (std::vector<Window>{{0, 4, 1}, {3, 7, 4}, {6, 8, 7}}));
  EXPECT_EQ(windows_of(8, 3, 2), (std::vector<Window>{{0, 4, 1}, {2, 6, 4}, {4, 8, 6}}));
  EXPECT_EQ(windows_of(7, 4, 4), (std::vector<Window>{{0, 5, 1}, {2, 7, 5}}));
  for (const int64_t n : {0, 1, 2, 9, 10, 11, 100})
    for (const int64_t context : {1, 2, 9, 64, 200})
      for (int64_t stride = 0; stride <= context; stride += std::max<int64_t>(1, context / 5)) {
        int64_t scored = 1;
        for (const Window& w : windows_of(n, context, stride)) {
          EXPECT_EQ(w.first, scored);
          EXPECT_LE(w.end - 1 - w.begin, context);
          const int64_t before = stride == 0 ? 1 : std::min(w.first, context - stride + 1);
          EXPECT_GE(w.first - w.begin, before);
          EXPECT_GE(w.begin, 0);
          scored = w.end;
        }
        EXPECT_EQ(scored, std::max<int64_t>(1, n));
      }
  EXPECT_THROW(windows_of(8, 3, 4), Error);
}

}  // namespace
}  // namespace ingot
