// A decoder that computes parts of several prompts in one pass, together with the pending tokens of answers.
#include <gtest/gtest.h>

#include <numeric>

#include "ingot/engines/serve/scheduler.h"
#include "ingot/engines/serve/scheduler_requests.test.h"
#include "ingot/models/device_decoder.h"

namespace ingot {
namespace {

using testing::alone;
using testing::Asked;
using testing::error_of;
using testing::Gate;
using testing::ids_of;
using testing::rounding_of;
using testing::ServedModel;

// A decoder that computes parts of several prompts in one pass, and records the passes.
class Together final : public DeviceDecoder {
 public:
  explicit Together(std::unique_ptr<Decoder> inner, Device device = {})
      : DeviceDecoder(inner->slots()), inner_(std::move(inner)), device_(device) {
    while (inner_->open_slots() < inner_->slots()) inner_->open();
    rows_.resize(size_t(inner_->slots()));
  }
  int64_t vocab() const override { return inner_->vocab(); }
  int64_t context() const override { return inner_->context(); }
  int64_t batch() const override { return inner_->batch(); }
  bool extends_together() const override { return true; }
  int64_t draft_rows() const override { return rows_of_drafts; }
  Device device() const override { return device_; }
  std::vector<std::vector<int64_t>> passes;  // tokens of each part; tokens of answers are left out
  size_t answers = 0;                        // parts of one token in these passes
  bool fails = false;                        // the next pass ends with an error
  std::function<void()> after_pass;          // called at the end of a pass over several parts
  int64_t rows_of_drafts = 1;
  size_t draft_steps = 0;
  // p: a pass over prompts; a: a step of an answer whose next step may be computed ahead; s: another step of an answer
  std::string order;
  int64_t tokens_of_prompts() const {
    int64_t all = 0;
    for (const auto& pass : passes) all = std::accumulate(pass.begin(), pass.end(), all);
    return all;
  }

 private:
  void clear(int slot) override { inner_->rewind(slot, 0); }
  int64_t cached_length(int slot) const override { return inner_->length(slot); }
  int64_t truncate(int slot, int64_t length) override { return inner_->rewind(slot, length); }
  void save_checkpoint(int slot) override { inner_->checkpoint(slot); }
  bool copy_tokens(int from, int to, int64_t length) override { return inner_->copy_prefix(from, to, length) > 0; }
  void extend_slot(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) override {
    if (ids.size() > 1) passes.push_back({int64_t(ids.size())});
    inner_->extend(slot, ids, rows, take);
  }
  void extend_on_device(int slot, std::span<const int32_t> ids, const SlotSample* next) override {
    order += next == nullptr ? 'p' : next->goes_on ? 'a' : 's';
    extend_slot(slot, ids, Rows::last, [&](int64_t, const Tensor& logits) { store(slot, logits); });
  }
  void extend_parts_on_device(std::span<const Part> parts) override {
    if (std::exchange(fails, false)) fail(ErrorCode::interrupted, "gave up");
    passes.emplace_back();
    order += 'p';
    for (const Part& part : parts) {
      if (part.ids.size() > 1)
        passes.back().push_back(int64_t(part.ids.size()));
      else
        ++answers;
      inner_->extend(part.slot, part.ids, Rows::last, [&](int64_t, const Tensor& logits) { store(part.slot, logits); });
    }
    if (passes.back().empty()) passes.pop_back();
    if (after_pass) after_pass();
  }
  void store(int slot, const Tensor& logits) {
    rows_[size_t(slot)].assign(logits.ptr<float>(), logits.ptr<float>() + vocab());
  }
  bool samples_on_device(const SlotSample&) const override { return false; }
  std::vector<SlotSampled> sample_on_device(std::span<const SlotSample>) override { return {}; }
  std::vector<std::vector<SlotSampled>> sample_drafts_on_device(std::span<const DraftStep> steps) override {
    std::vector<std::vector<SlotSampled>> all;
    for (const auto& [ids, samples] : steps) {
      ++draft_steps;
      std::vector<SlotSampled>& sampled = all.emplace_back();
      for (size_t i = 0; i < ids.size() && (i == 0 || sampled.back().token.token == ids[i]); ++i) {
        const int slot = samples[i].slot;
        inner_->extend(slot, ids.subspan(i, 1), Rows::last,
                       [&](int64_t, const Tensor& logits) { store(slot, logits); });
        sampled.push_back(sample_row(Tensor(rows_[size_t(slot)].data(), {vocab()}), samples[i]));
      }
    }
    return all;
  }
  void copy_logits_to_host(int slot, const Take& take) override {
    take(cached_length(slot) - 1, Tensor(rows_[size_t(slot)].data(), {1, vocab()}));
  }
  std::unique_ptr<Decoder> inner_;
  const Device device_;
  std::vector<std::vector<float>> rows_;
};

// Requests that arrive while a first answer waits between two tokens.
struct Burst {
  Gate gate;
  Asked answering;
  std::vector<Asked> asked;
  Burst(Scheduler& scheduler, int64_t tokens, size_t requests, const auto& request) : asked(requests) {
    ServeRequest r = answering.request(ids_of(9, 3), tokens, "first");
    gate.hold(r);
    scheduler.submit(std::move(r));
    gate.reached.get_future().wait();
    for (size_t i = 0; i < requests; ++i) scheduler.submit(request(asked[i], i));
    gate.open.set_value();
  }
};

TEST(scheduler, prompts_of_several_requests_are_computed_in_one_pass) {
  const ServedModel m;
  Together decoder(m.decoder(5, 200, 64));
  Scheduler scheduler(decoder);
  std::vector<Answer> expected(4);
  Burst burst(scheduler, 30, 4, [&](Asked& a, size_t i) {
    ServeRequest r = a.request(ids_of(20 + i, 14 + int64_t(i)), 8);
    expected[i] = alone(m, r);
    return r;
  });
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(burst.asked[i].wait().reused, 0);
    EXPECT_EQ(burst.asked[i].tokens, expected[i].tokens) << i;
  }
  burst.answering.wait();
  EXPECT_EQ(decoder.passes, (std::vector<std::vector<int64_t>>{{3}, {14, 15, 16, 17}}));
}

TEST(scheduler, an_idle_scheduler_waits_for_an_announced_request_and_for_no_other) {
  const ServedModel m;
  Together decoder(m.decoder(2, 200, 64));
  Scheduler scheduler(decoder, {.announced_seconds = 100});
  Asked first, second, alone;
  auto announced = scheduler.announce();
  scheduler.submit(first.request(ids_of(1, 14), 2));
  scheduler.submit(second.request(ids_of(2, 15), 2));
  EXPECT_EQ(first.ended.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  announced.reset();
  first.wait(), second.wait();
  scheduler.submit(alone.request(ids_of(3, 16), 2));
  alone.wait();
  EXPECT_EQ(decoder.passes, (std::vector<std::vector<int64_t>>{{14, 15}, {16}}));
}

// A GPU has begun the next step of the answer when the prompts arrive. No step is computed ahead of a pass over
// prompts.
TEST(scheduler, a_step_that_a_gpu_computes_ahead_comes_before_prompts_that_arrived_meanwhile) {
  const ServedModel m;
  for (const Device device : {Device{}, Device{Device::cuda, 0}}) {
    Together decoder(m.decoder(3, 200, 64), device);
    Scheduler scheduler(decoder);
    std::vector<Answer> expected(2);
    Burst burst(scheduler, 6, 2, [&](Asked& a, size_t i) {
      ServeRequest r = a.request(ids_of(20 + i, 14), 2);
      expected[i] = alone(m, r);
      return r;
    });
    for (size_t i = 0; i < 2; ++i) {
      burst.asked[i].wait();
      EXPECT_EQ(burst.asked[i].tokens, expected[i].tokens) << i;
    }
    burst.answering.wait();
    EXPECT_EQ(decoder.order, device.kind == Device::cuda ? "pspassas" : "ppassaas");
  }
}

TEST(scheduler, pending_tokens_of_answers_share_the_passes_of_prompts_and_survive_their_errors) {
  const ServedModel m;
  for (const bool fails : {false, true}) {
    Together decoder(m.decoder(3, 200, 64));
    decoder.fails = fails;
    Scheduler scheduler(decoder, {.chunk = 16});
    Asked lonely;
    const Answer answer = alone(m, lonely.request(ids_of(9, 3), 12));
    std::vector<Answer> expected(2);
    Burst burst(scheduler, 12, 2, [&](Asked& a, size_t i) {
      ServeRequest r = a.request(ids_of(20 + i, 20), 4);
      expected[i] = alone(m, r);
      return r;
    });
    if (fails)
      EXPECT_NE(error_of([&] { burst.asked[0].wait(); }).find("gave up"), std::string::npos);
    else
      burst.asked[0].wait();
    burst.asked[1].wait(), burst.answering.wait();
    EXPECT_EQ(burst.asked[0].tokens, fails ? std::vector<int32_t>() : expected[0].tokens);
    EXPECT_EQ(burst.asked[1].tokens, expected[1].tokens);
    EXPECT_EQ(burst.answering.tokens, answer.tokens);
    EXPECT_EQ(decoder.passes, fails ? (std::vector<std::vector<int64_t>>{{3}, {16}, {4}})
                                    : (std::vector<std::vector<int64_t>>{{3}, {16}, {16}, {4, 4}}));
    EXPECT_GE(decoder.answers, fails ? 2u : 3u);
  }
}

// Long prompts are fed in many passes, whose parts of one token are the pending tokens of the answers. The client of
// one answer takes a token in every third round only.
TEST(scheduler, answers_beside_many_passes_of_prompts_are_the_answers_of_requests_alone) {
  const ServedModel m;
  Together decoder(m.decoder(6, 200, 64));
  Scheduler scheduler(decoder, {.chunk = 16});
  std::vector<Answer> expected(5);
  int asks = 0;
  Burst burst(scheduler, 25, 5, [&](Asked& a, size_t i) {
    ServeRequest r = a.request(ids_of(20 + i, i < 2 ? 3 : 70), 25 + int64_t(i), std::to_string(i));
    r.sampling.temperature = 1;
    r.seed = i;
    r.logprobs = 2;
    if (i == 0) r.ready = [&] { return ++asks % 3 == 0; };
    expected[i] = alone(m, r);
    return r;
  });
  for (size_t i = 0; i < 5; ++i) {
    burst.asked[i].wait();
    EXPECT_EQ(burst.asked[i].tokens, expected[i].tokens) << i;
    for (size_t t = 0; t < expected[i].logprobs.size(); ++t)
      EXPECT_NEAR(burst.asked[i].logprobs[t].sampled, expected[i].logprobs[t].sampled,
                  rounding_of(m.config, expected[i].logprobs[t].sampled));
  }
  burst.answering.wait();
  EXPECT_GE(decoder.answers, 30u);
}

// The pending tokens of an answer with drafts are rows of draft steps, also while prompts are fed.
TEST(scheduler, a_drafted_answer_keeps_its_draft_steps_beside_prompts) {
  const ServedModel m;
  Together decoder(m.decoder(3, 200, 64));
  decoder.rows_of_drafts = 8;
  Scheduler scheduler(
      decoder,
      {.draft = {.make = draft::make_lookup, .most = 7, .step_costs = {1, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07}},
       .chunk = 2});
  Asked drafted, prompt;
  Gate gate;
  ServeRequest r = drafted.request(ids_of(1, 9), 60);
  r.sampling.temperature = 1.5;
  const Answer expected = alone(m, r);
  r.prediction = {r.prompt.end() - 4, r.prompt.end()};
  r.prediction.insert(r.prediction.end(), expected.tokens.begin(), expected.tokens.end());
  gate.hold(r);
  scheduler.submit(std::move(r));
  gate.reached.get_future().wait();
  scheduler.submit(prompt.request(ids_of(2, 190), 1));
  gate.open.set_value();
  const ServeOutcome o = drafted.wait();
  EXPECT_EQ(drafted.tokens, expected.tokens);
  EXPECT_GE(o.drafts.accepted, 40);
  EXPECT_EQ(decoder.answers, 0u);
  prompt.wait();
}

TEST(scheduler, a_gpu_s_draft_steps_are_measured_before_the_first_request_if_any_request_may_be_drafted) {
  const ServedModel m;
  for (const Device device : {Device{}, Device{Device::cuda, 0}})
    for (const DraftWhich drafted : {DraftWhich::none, DraftWhich::predicted, DraftWhich::all}) {
      Together decoder(m.decoder(2, 200, 64), device);
      decoder.rows_of_drafts = 8;
      Scheduler scheduler(decoder, {.drafted = drafted});
      const bool measured =
          drafted == DraftWhich::all || (drafted == DraftWhich::predicted && device.kind == Device::cuda);
      EXPECT_EQ(decoder.draft_steps > 0, measured) << device << int(drafted);
    }
}

TEST(scheduler, a_prompt_is_scored_beside_answers) {
  const ServedModel m;
  Together decoder(m.decoder(3, 200, 64));
  Scheduler scheduler(decoder, {.chunk = 4});
  std::vector<TokenLogprobs> scores;
  Answer expected;
  Burst burst(scheduler, 20, 2, [&](Asked& a, size_t i) {
    ServeRequest r = a.request(ids_of(3 + i, i == 0 ? 3 : 21), i == 0 ? 20 : 0);
    if (i == 0) expected = alone(m, r);
    if (i == 1)
      r.on_prompt = [&](std::span<const TokenLogprobs> s) { scores.insert(scores.end(), s.begin(), s.end()); };
    return r;
  });
  EXPECT_EQ(burst.asked[0].wait().tokens, 20);
  EXPECT_EQ(burst.asked[0].tokens, expected.tokens);
  EXPECT_EQ(burst.answering.wait().tokens, 20);
  EXPECT_EQ(burst.asked[1].wait().tokens, 0);
  EXPECT_EQ(scores.size(), 20u);
}

// The pending tokens of eight answers alone would fill the batch.
TEST(scheduler, answers_leave_half_of_a_batch_to_prompts) {
  const ServedModel m;
  Together decoder(m.decoder(9, 200, 8));
  Scheduler scheduler(decoder);
  int64_t when_first = -1;
  std::vector<Asked*> answers;
  Burst burst(scheduler, 60, 8, [&](Asked& a, size_t i) {
    ServeRequest r = a.request(ids_of(20 + i, i < 7 ? 3 : 40), i < 7 ? 60 : 1);
    if (i == 7)
      r.on_token = [&](int32_t, const TokenLogprobs*) {
        when_first = int64_t(answers[0]->tokens.size());
        return true;
      };
    answers.push_back(&a);
    return r;
  });
  for (Asked& a : burst.asked) a.wait();
  burst.answering.wait();
  EXPECT_LE(when_first, 7 * 3 / 4 + 40 / 4 + 2);
}

// While passes over prompts go on, the slot of an answer fills up, so that its last token cannot be fed.
TEST(scheduler, an_answer_that_fills_its_context_beside_prompts_ends_alone) {
  const ServedModel m;
  Together decoder(m.decoder(3, 40, 16));
  Scheduler scheduler(decoder, {.chunk = 2});
  Burst burst(scheduler, 100, 2, [&](Asked& a, size_t i) { return a.request(ids_of(20 + i, 39), 1); });
  Asked third;
  scheduler.submit(third.request(ids_of(30, 39), 1));
  EXPECT_EQ(burst.answering.wait().finish, Finish::context);
  EXPECT_EQ(burst.answering.tokens.size(), 38u);
  for (Asked* const a : {&burst.asked[0], &burst.asked[1], &third}) EXPECT_EQ(a->wait().tokens, 1);
}

// After the pass, the slot holds the pending token of the cancelled answer exactly once.
TEST(scheduler, an_answer_cancelled_in_a_pass_leaves_its_tokens_to_the_client_s_next_prompt) {
  const ServedModel m;
  Together decoder(m.decoder(2, 200, 64));
  Scheduler scheduler(decoder, {.chunk = 16});
  Asked given_up, prompt;
  Gate gate;
  ServeRequest r = given_up.request(ids_of(9, 3), 100, "a");
  gate.hold(r);
  const auto job = scheduler.submit(std::move(r));
  gate.reached.get_future().wait();
  decoder.after_pass = [&] { scheduler.cancel(job); };
  ServeRequest beside = prompt.request(ids_of(31, 40), 8, "b");
  const Answer expected = alone(m, beside);
  scheduler.submit(std::move(beside));
  gate.open.set_value();
  EXPECT_EQ(given_up.wait().finish, Finish::cancelled);
  prompt.wait();
  EXPECT_EQ(prompt.tokens, expected.tokens);
  std::vector<int32_t> longer = ids_of(9, 3);
  longer.insert(longer.end(), given_up.tokens.begin(), given_up.tokens.end());
  const int64_t held = int64_t(longer.size());
  longer.push_back(5);
  Asked again;
  ServeRequest next = again.request(longer, 6, "a");
  next.logprobs = 0;
  const Answer continued = alone(m, next);
  scheduler.submit(std::move(next));
  EXPECT_EQ(again.wait().reused, held);
  EXPECT_EQ(again.tokens, continued.tokens);
  for (size_t t = 0; t < continued.logprobs.size(); ++t)
    EXPECT_NEAR(again.logprobs[t].sampled, continued.logprobs[t].sampled,
                rounding_of(m.config, continued.logprobs[t].sampled));
}

// The part that did not fit is fed first in the next pass, and a prompt of many chunks does not delay shorter prompts.
TEST(scheduler, a_long_prompt_leaves_room_for_the_prompts_that_follow) {
  const ServedModel m;
  Together decoder(m.decoder(4, 200, 64));
  Scheduler scheduler(decoder, {.chunk = 16});
  const std::vector<int64_t> lengths = {50, 20, 6};
  Burst burst(scheduler, 30, 3, [&](Asked& a, size_t i) { return a.request(ids_of(30 + i, lengths[i]), 1); });
  for (Asked& a : burst.asked) a.wait();
  burst.answering.wait();
  EXPECT_EQ(decoder.passes, (std::vector<std::vector<int64_t>>{{3}, {16}, {16}, {6, 10}, {16}, {4, 8}}));
}

TEST(scheduler, a_request_cancelled_in_its_prompt_does_not_change_the_other_prompts) {
  const ServedModel m;
  Together decoder(m.decoder(3, 200, 64));
  Scheduler scheduler(decoder, {.chunk = 16});
  Gate gate;
  Asked answering, given_up, other;
  ServeRequest r = answering.request(ids_of(9, 3), 30, "first");
  r.on_token = [&, also = r.on_token](int32_t id, const TokenLogprobs* p) {
    if (answering.tokens.size() == 2) scheduler.cancel(given_up.job);
    return also(id, p);
  };
  gate.hold(r);
  scheduler.submit(std::move(r));
  gate.reached.get_future().wait();
  ServeRequest beside = other.request(ids_of(31, 40), 8);
  const Answer expected = alone(m, beside);
  given_up.job = scheduler.submit(given_up.request(ids_of(30, 90), 8));
  scheduler.submit(std::move(beside));
  gate.open.set_value();
  EXPECT_EQ(given_up.wait().finish, Finish::cancelled);
  EXPECT_TRUE(given_up.tokens.empty());
  EXPECT_EQ(other.wait().finish, Finish::length);
  EXPECT_EQ(other.tokens, expected.tokens);
  EXPECT_EQ(answering.wait().tokens, 30);
  EXPECT_LT(decoder.tokens_of_prompts(), 3 + 40 + 90) << "the rest of the prompt is not computed";
}

TEST(scheduler, chunks_follow_the_measured_time) {
  const ServedModel m;
  // With 1e-9 every chunk takes longer than the target, with 1e6 none does. The answer's token takes a place of a pass
  // of full length.
  for (const double seconds : {1e-9, 1e6}) {
    Together decoder(m.decoder(2, 2000, 1024));
    Scheduler scheduler(decoder, {.chunk_seconds = seconds});
    Burst burst(scheduler, 40, 1, [&](Asked& a, size_t) { return a.request(ids_of(5, 1400), 1); });
    burst.asked[0].wait();
    burst.answering.wait();
    std::vector<int64_t> chunks;
    for (const auto& pass : decoder.passes) chunks.push_back(pass[0]);
    chunks.resize(4);
    EXPECT_EQ(chunks, seconds < 1 ? (std::vector<int64_t>{3, 256, 64, 64}) : (std::vector<int64_t>{3, 256, 1023, 121}));
  }
}

// The requests of several agents: the same system prompt, sixteen times at once.
TEST(scheduler, the_common_beginning_of_a_client_s_prompts_is_computed_once) {
  const ServedModel m;
  Together decoder(m.decoder(6, 320, 256));
  Scheduler scheduler(decoder, {.chunk = 96});
  const std::vector<int32_t> system = ids_of(40, 288);
  std::vector<Answer> expected(5);
  Burst burst(scheduler, 30, 5, [&](Asked& a, size_t i) {
    std::vector<int32_t> prompt = system;
    for (const int32_t id : ids_of(50 + i, 7)) prompt.push_back(id);
    prompt[288] = int32_t(i);  // where the prompts begin to differ
    ServeRequest r = a.request(prompt, 6, i == 4 ? "other" : "agent");
    expected[i] = alone(m, r);
    return r;
  });
  int64_t reused = 0;
  for (size_t i = 0; i < 5; ++i) {
    const ServeOutcome o = burst.asked[i].wait();
    EXPECT_EQ(burst.asked[i].tokens, expected[i].tokens) << i;
    EXPECT_EQ(burst.asked[i].tokens.size(), 6u);
    if (i < 4)
      reused += o.reused;
    else
      EXPECT_EQ(o.reused, 0) << "another client's tokens";
  }
  burst.answering.wait();
  EXPECT_EQ(reused, 3 * 288);
  EXPECT_EQ(scheduler.counts().reused_tokens, 3 * 288);
  EXPECT_EQ(decoder.tokens_of_prompts(), 3 + 2 * 288 + 5 * 7);
}

TEST(scheduler, a_prompt_waits_for_the_same_prompt_of_its_own_client_alone) {
  const ServedModel m;
  for (const bool same : {false, true}) {
    Together decoder(m.decoder(3, 320, 256));
    Scheduler scheduler(decoder);
    Burst burst(scheduler, 30, 2,
                [&](Asked& a, size_t i) { return a.request(ids_of(40, 100), 4, same || i == 0 ? "a" : "b"); });
    burst.asked[0].wait(), burst.asked[1].wait(), burst.answering.wait();
    EXPECT_EQ(burst.asked[1].tokens, burst.asked[0].tokens);
    EXPECT_EQ(decoder.passes, same ? (std::vector<std::vector<int64_t>>{{3}, {100}})
                                   : (std::vector<std::vector<int64_t>>{{3}, {100, 100}}));
  }
}

// The decoder computes prompts one after another, or parts of several prompts in one pass.
TEST(scheduler, many_threads_ask_and_cancel) {
  const ServedModel m;
  const auto alone = m.decoder(4);
  Together together(m.decoder(4));
  for (Decoder* const decoder : {alone.get(), static_cast<Decoder*>(&together)}) {
    Scheduler scheduler(*decoder, {.waiting = 1000, .chunk = 3});
    std::vector<Asked> asked(64);
    std::vector<std::thread> threads;
    for (size_t t = 0; t < 8; ++t)
      threads.emplace_back([&, t] {
        for (size_t i = t; i < asked.size(); i += 8) {
          asked[i].job = scheduler.submit(asked[i].request(ids_of(i % 5, 12), 6, std::to_string(t)));
          if (i % 3 == 0) scheduler.cancel(asked[i].job);
        }
      });
    for (std::thread& t : threads) t.join();
    std::vector<int32_t> known[5];
    for (size_t i = 0; i < asked.size(); ++i) {
      const ServeOutcome o = asked[i].wait();
      if (o.finish == Finish::cancelled) continue;
      std::vector<int32_t>& same = known[i % 5];
      if (same.empty()) same = asked[i].tokens;
      EXPECT_EQ(asked[i].tokens, same) << i;
    }
  }
}

}  // namespace
}  // namespace ingot
