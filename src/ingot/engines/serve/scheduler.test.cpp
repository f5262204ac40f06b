#include "ingot/engines/serve/scheduler.h"

#include <gtest/gtest.h>

#include "ingot/engines/serve/scheduler_requests.test.h"

namespace ingot {
namespace {

using testing::alone;
using testing::Asked;
using testing::error_of;
using testing::Gate;
using testing::ids_of;
using testing::rounding_of;
using testing::ServedModel;

TEST(scheduler, requests_that_share_the_slots_get_the_answers_of_requests_alone) {
  const ServedModel m;
  const auto decoder = m.decoder(3);
  Scheduler scheduler(*decoder, {.chunk = 5});
  std::vector<Asked> asked(12);
  std::vector<Answer> expected;
  for (size_t i = 0; i < asked.size(); ++i) {
    ServeRequest r = asked[i].request(ids_of(i, 1 + int64_t(i) * 7), 3 + int64_t(i) % 5, std::to_string(i % 3));
    r.sampling.temperature = i % 2 == 0 ? 0 : 1;
    r.seed = i;
    r.bias = {{.id = int32_t(i), .bias = 1}};
    r.logprobs = 2;
    expected.push_back(alone(m, r));
    scheduler.submit(std::move(r));
  }
  for (size_t i = 0; i < asked.size(); ++i) {
    const ServeOutcome o = asked[i].wait();
    EXPECT_EQ(asked[i].tokens, expected[i].tokens) << i;
    EXPECT_EQ(o.finish, expected[i].finish) << i;
    EXPECT_EQ(o.tokens, int64_t(expected[i].tokens.size())) << i;
    ASSERT_EQ(asked[i].logprobs.size(), expected[i].logprobs.size());
    for (size_t t = 0; t < expected[i].logprobs.size(); ++t)
      EXPECT_NEAR(asked[i].logprobs[t].sampled, expected[i].logprobs[t].sampled,
                  rounding_of(m.config, expected[i].logprobs[t].sampled));
  }
  EXPECT_TRUE(scheduler.drain(10));
  const ServeCounts c = scheduler.counts();
  EXPECT_EQ(c.full, 12);
  EXPECT_EQ(c.running + c.waiting, 0);
}

TEST(scheduler, a_client_s_next_turn_reuses_the_tokens_of_its_slot_and_another_client_s_turn_does_not) {
  const ServedModel m;
  for (const int64_t slots : {1, 2}) {
    const auto decoder = m.decoder(slots);
    Scheduler scheduler(*decoder);
    const std::vector<int32_t> prompt = ids_of(1, 20);
    Asked first, again, other;
    scheduler.submit(first.request(prompt, 4, "a"));
    EXPECT_EQ(first.wait().reused, 0);
    std::vector<int32_t> longer = prompt;
    longer.insert(longer.end(), first.tokens.begin(), first.tokens.end());
    longer.push_back(5);
    ServeRequest r = again.request(longer, 6, "a");
    const Answer expected = alone(m, r);
    scheduler.submit(std::move(r));
    EXPECT_GT(again.wait().reused, 0);
    EXPECT_EQ(again.tokens, expected.tokens);
    scheduler.submit(other.request(longer, 6, "b"));
    EXPECT_EQ(other.wait().reused, 0);
    EXPECT_EQ(other.tokens, expected.tokens);
  }
}

TEST(scheduler, a_new_client_gets_the_free_slot_that_was_used_longest_ago) {
  const ServedModel m;
  const auto decoder = m.decoder(2);
  Scheduler scheduler(*decoder);
  const auto reused = [&](uint64_t prompt, const char* client) {
    Asked a;
    scheduler.submit(a.request(ids_of(prompt, 20), 4, client));
    return a.wait().reused;
  };
  EXPECT_EQ(reused(1, "a"), 0);
  EXPECT_EQ(reused(2, "b"), 0);
  EXPECT_EQ(reused(1, "a"), 19);
  EXPECT_EQ(reused(3, "c"), 0);  // in the slot of b
  EXPECT_EQ(reused(1, "a"), 19);
  EXPECT_EQ(reused(2, "b"), 0);  // in the slot of c
  EXPECT_EQ(reused(1, "a"), 19);
  EXPECT_EQ(reused(1, "d"), 0);  // in the slot of b: the slot of a holds the same prompt, which is of another client
  EXPECT_EQ(reused(1, "a"), 19);
}

// A chat may leave out earlier thoughts. Here the answer is longer than the window, so that its keys would be gone
// without the checkpoint at the prompt's end.
TEST(scheduler, a_next_turn_without_the_last_answer_continues_from_the_end_of_its_prompt) {
  const ServedModel m;
  const auto decoder = m.decoder(1);
  Scheduler scheduler(*decoder);
  std::vector<int32_t> prompt = ids_of(1, 20);
  Asked first, again;
  scheduler.submit(first.request(prompt, 40, "a"));
  first.wait();
  prompt.insert(prompt.end(), {first.tokens[0] == 7 ? 8 : 7, 9, 11});
  ServeRequest r = again.request(prompt, 6, "a");
  const Answer expected = alone(m, r);
  scheduler.submit(std::move(r));
  EXPECT_EQ(again.wait().reused, 20);
  EXPECT_EQ(again.tokens, expected.tokens);
}

TEST(scheduler, clients_take_turns_and_too_many_waiting_are_refused) {
  const ServedModel m;
  const auto decoder = m.decoder();
  Scheduler scheduler(*decoder, {.waiting = 4});
  Gate gate;
  std::vector<int> order;
  std::vector<Asked> asked(6);
  const char* clients[] = {"busy", "busy", "busy", "busy", "quiet"};
  for (int i = 0; i < 5; ++i) {
    ServeRequest r = asked[size_t(i)].request(ids_of(1, 3), 2, clients[i]);
    if (i == 0) gate.hold(r);
    r.on_end = [&order, i, also = r.on_end](const ServeOutcome& o) {
      order.push_back(i);
      also(o);
    };
    scheduler.submit(std::move(r));
    if (i == 0) gate.reached.get_future().wait();
  }
  EXPECT_EQ(error_of([&] { scheduler.submit(asked[5].request(ids_of(1, 3), 2, "late")); }),
            "busy: found 4 requests waiting, expected at most 4");
  gate.open.set_value();
  for (int i = 0; i < 5; ++i) asked[size_t(i)].wait();
  EXPECT_EQ(order, (std::vector<int>{0, 4, 1, 2, 3}));
  EXPECT_EQ(scheduler.counts().refused, 1);
}

TEST(scheduler, a_request_that_waits_too_long_for_a_slot_ends_with_an_error) {
  const ServedModel m;
  const auto decoder = m.decoder();
  Scheduler scheduler(*decoder, {.wait_seconds = 0.05});
  Gate gate;
  Asked running, waiting;
  ServeRequest r = running.request(ids_of(1, 3), 4);
  gate.hold(r);
  scheduler.submit(std::move(r));
  gate.reached.get_future().wait();
  scheduler.submit(waiting.request(ids_of(2, 3), 5));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  gate.open.set_value();
  EXPECT_EQ(error_of([&] { waiting.wait(); }), "busy: waited 0.05 s for a free slot, which did not come");
  EXPECT_TRUE(waiting.tokens.empty());
  EXPECT_EQ(running.wait().tokens, 4);
}

TEST(scheduler, a_request_whose_client_is_not_ready_keeps_its_slot_and_gets_no_token) {
  const ServedModel m;
  const auto decoder = m.decoder(2);
  Scheduler scheduler(*decoder);
  Asked slow, other;
  std::atomic<bool> ready = true, paused = false;
  ServeRequest r = slow.request(ids_of(1, 3), 60);
  const Answer expected = alone(m, r);
  r.on_token = [&, also = r.on_token](int32_t id, const TokenLogprobs* p) {
    if (slow.tokens.size() == 9) ready = false;
    return also(id, p);
  };
  r.ready = [&] { return ready || (paused = true, false); };
  scheduler.submit(std::move(r));
  while (!paused) std::this_thread::yield();
  scheduler.submit(other.request(ids_of(2, 3), 40));
  EXPECT_EQ(other.wait().tokens, 40);
  EXPECT_EQ(slow.tokens.size(), 10u);
  ready = true;
  EXPECT_EQ(slow.wait().tokens, 60);
  EXPECT_EQ(slow.tokens, expected.tokens);
}

TEST(scheduler, cancelled_requests_end_once_waiting_or_answering) {
  const ServedModel m;
  const auto decoder = m.decoder();
  Scheduler scheduler(*decoder);
  Gate gate;
  Asked running, waiting, after;
  ServeRequest r = running.request(ids_of(1, 3), 150);
  gate.hold(r);
  const auto job = scheduler.submit(std::move(r));
  gate.reached.get_future().wait();
  const auto queued = scheduler.submit(waiting.request(ids_of(2, 3), 5));
  scheduler.submit(after.request(ids_of(3, 3), 5));
  scheduler.cancel(queued);
  scheduler.cancel(job);
  scheduler.cancel(job);
  gate.open.set_value();
  EXPECT_EQ(running.wait().finish, Finish::cancelled);
  EXPECT_EQ(waiting.wait().finish, Finish::cancelled);
  EXPECT_TRUE(waiting.tokens.empty());
  EXPECT_EQ(running.tokens.size(), 1u);
  EXPECT_EQ(after.wait().finish, Finish::length);
  EXPECT_EQ(after.tokens.size(), 5u);
  scheduler.cancel(job);
  EXPECT_EQ(scheduler.counts().cancelled, 2);
}

TEST(scheduler, a_long_prompt_does_not_hold_up_an_answer_for_longer_than_a_chunk) {
  const ServedModel m;
  const auto decoder = m.decoder(2);
  Scheduler scheduler(*decoder, {.chunk = 4});
  Gate gate;
  Asked answering, asking;
  int64_t when_first = -1;
  ServeRequest r = answering.request(ids_of(1, 3), 100);
  gate.hold(r);
  scheduler.submit(std::move(r));
  gate.reached.get_future().wait();
  ServeRequest late = asking.request(ids_of(2, 80), 1);
  late.on_token = [&](int32_t, const TokenLogprobs*) {
    when_first = int64_t(answering.tokens.size());
    return true;
  };
  scheduler.submit(std::move(late));
  gate.open.set_value();
  answering.wait();
  asking.wait();
  EXPECT_GE(when_first, 80 / 4 - 1);  // one request gets a token after each chunk of the other request
}

TEST(scheduler, a_busy_slot_serves_another_request_of_its_client) {
  const ServedModel m;
  const auto decoder = m.decoder(2, 200, 64);
  Scheduler scheduler(*decoder);
  Asked first, second, stranger;
  const std::vector<int32_t> prompt = ids_of(7, 40);
  Gate gate;
  ServeRequest r = first.request(prompt, 20, "a");
  gate.hold(r);
  scheduler.submit(std::move(r));
  gate.reached.get_future().wait();
  std::vector<int32_t> longer = prompt;
  longer.push_back(11);
  ServeRequest again = second.request(longer, 5, "a");
  const Answer expected = alone(m, again);
  scheduler.submit(std::move(again));
  gate.open.set_value();
  EXPECT_EQ(second.wait().reused, 40);
  EXPECT_EQ(second.tokens, expected.tokens);
  first.wait();
  scheduler.submit(stranger.request(longer, 5, "b"));
  EXPECT_EQ(stranger.wait().reused, 0);
  EXPECT_EQ(stranger.tokens, expected.tokens);
}

TEST(scheduler, a_prompt_is_scored_as_a_whole_even_if_the_slot_holds_its_beginning) {
  const ServedModel m;
  const auto decoder = m.decoder();
  const std::vector<int32_t> prompt = ids_of(3, 21);
  Scheduler scheduler(*decoder, {.chunk = 5});
  Asked plain;
  scheduler.submit(plain.request(prompt, 3));
  plain.wait();
  std::vector<double> expected;  // computed by scoring each token of the prompt from the tokens before it
  for (size_t n = 1; n < prompt.size(); ++n) {
    Asked forced;
    ServeRequest r = forced.request({prompt.begin(), prompt.begin() + int64_t(n)}, 1);
    r.logprobs = 0;
    r.bias = {{.id = prompt[n], .bias = 1000}};
    scheduler.submit(std::move(r));
    forced.wait();
    ASSERT_EQ(forced.tokens, std::vector<int32_t>{prompt[n]});
    expected.push_back(forced.logprobs[0].sampled);
  }
  for (const int64_t tokens : {0, 3}) {
    Asked scored;
    std::vector<TokenLogprobs> scores;
    ServeRequest r = scored.request(prompt, tokens);
    r.logprobs = 2;
    r.on_prompt = [&](std::span<const TokenLogprobs> s) {
      EXPECT_TRUE(scored.tokens.empty());
      scores.insert(scores.end(), s.begin(), s.end());
    };
    scheduler.submit(std::move(r));
    const ServeOutcome o = scored.wait();
    EXPECT_EQ(o.finish, Finish::length);
    EXPECT_EQ(o.reused, 0);
    EXPECT_EQ(o.tokens, tokens);
    ASSERT_EQ(scores.size(), expected.size());
    for (size_t i = 0; i < scores.size(); ++i) {
      EXPECT_NEAR(scores[i].sampled, expected[i], 1e-5) << i;
      ASSERT_EQ(scores[i].top.size(), 2u);
      EXPECT_GE(scores[i].top[0].logprob, scores[i].sampled);
    }
    if (tokens > 0) { EXPECT_EQ(scored.tokens, plain.tokens); }
  }
}

TEST(scheduler, an_answer_ends_at_a_stop_id_at_false_and_where_the_context_is_full) {
  const ServedModel m;
  const auto decoder = m.decoder(1, 24);
  Scheduler scheduler(*decoder);
  Asked plain, stopped, ended, full;
  scheduler.submit(plain.request(ids_of(1, 4), 6));
  plain.wait();
  ServeRequest r = stopped.request(ids_of(1, 4), 6);
  r.stop_ids = {plain.tokens[0]};
  scheduler.submit(std::move(r));
  EXPECT_EQ(stopped.wait().stop_id, plain.tokens[0]);
  EXPECT_TRUE(stopped.tokens.empty());
  r = ended.request(ids_of(1, 4), 6);
  r.on_token = [&](int32_t id, const TokenLogprobs*) { return ended.tokens.push_back(id), ended.tokens.size() < 2; };
  scheduler.submit(std::move(r));
  EXPECT_EQ(ended.wait().finish, Finish::stop);
  EXPECT_EQ(ended.tokens.size(), 2u);
  scheduler.submit(full.request(ids_of(1, 4), 100));
  EXPECT_EQ(full.wait().finish, Finish::context);
  EXPECT_EQ(full.tokens.size(), 21u);  // the last token is sampled without being fed
}

TEST(scheduler, a_request_that_fails_does_not_disturb_the_other_requests) {
  const ServedModel m;
  const auto decoder = m.decoder(2);
  Scheduler scheduler(*decoder);
  Asked good, bad, thrown;
  ServeRequest nothing = bad.request(ids_of(2, 5), 9);
  for (int32_t id = 0; id < 37; ++id) nothing.bias.push_back({.id = id, .bias = -HUGE_VALF});
  ServeRequest throws = thrown.request(ids_of(3, 5), 9);
  throws.on_token = [](int32_t, const TokenLogprobs*) -> bool { fail(ErrorCode::io, "no"); };
  ServeRequest r = good.request(ids_of(1, 5), 40);
  const Answer expected = alone(m, r);
  scheduler.submit(std::move(r));
  scheduler.submit(std::move(nothing));
  scheduler.submit(std::move(throws));
  EXPECT_NE(error_of([&] { bad.wait(); }), "");
  EXPECT_EQ(error_of([&] { thrown.wait(); }), "input/output: no");
  good.wait();
  EXPECT_EQ(good.tokens, expected.tokens);
  EXPECT_EQ(scheduler.counts().failed, 2);
}

TEST(scheduler, requests_that_the_model_cannot_serve_are_refused_before_they_wait) {
  const ServedModel m;
  const auto decoder = m.decoder(1, 24);
  Scheduler scheduler(*decoder);
  Asked a;
  const auto refusal = [&](auto change) {
    ServeRequest r = a.request(ids_of(1, 4), 5);
    change(r);
    return error_of([&] { scheduler.submit(std::move(r)); });
  };
  EXPECT_EQ(refusal([](auto& r) { r.prompt = {}; }), "usage: found an empty prompt, expected at least one token");
  EXPECT_EQ(refusal([](auto& r) { r.prompt = {1, 37}; }), "usage: found id 37 in the prompt, expected 0 to 36");
  EXPECT_EQ(refusal([](auto& r) { r.prompt.resize(24); }),
            "usage: found a prompt of 24 tokens, expected fewer than 24, the context");
  EXPECT_EQ(refusal([](auto& r) { r.tokens = 0; }), "usage: found a limit of 0 tokens, expected at least 1");
  EXPECT_EQ(refusal([](auto& r) { r.logprobs = 38; }), "usage: found 38 logprobs, expected at most 37, the vocabulary");
  EXPECT_EQ(refusal([](auto& r) { r.bias = {{.id = -1}}; }), "usage: found id -1 with a bias, expected 0 to 36");
  EXPECT_NE(refusal([](auto& r) { r.sampling.top_p = 2; }), "");
  EXPECT_TRUE(scheduler.drain(1));
  EXPECT_EQ(refusal([](auto&) {}), "busy: the server is closing");
}

TEST(scheduler, only_ids_of_the_mask_are_sampled_and_an_error_of_the_mask_ends_only_its_request) {
  const ServedModel m;
  const auto decoder = m.decoder(2);
  Scheduler scheduler(*decoder);
  Asked held, bad, good;
  ServeRequest r = held.request(ids_of(1, 5), 12);
  r.sampling.temperature = 1;
  r.allowed = [&](std::span<const int32_t>) {  // allows the id that equals the number of tokens so far
    auto mask = std::make_shared<std::vector<uint32_t>>(2);
    (*mask)[held.tokens.size() / 32] = 1u << (held.tokens.size() % 32);
    return std::vector<ServeRequest::Mask>{mask};
  };
  ServeRequest throws = bad.request(ids_of(2, 5), 9);
  throws.allowed = [&](std::span<const int32_t>) -> std::vector<ServeRequest::Mask> {
    fail(ErrorCode::usage, "no more");
  };
  ServeRequest plain = good.request(ids_of(3, 5), 20);
  const Answer expected = alone(m, plain);
  scheduler.submit(std::move(r));
  scheduler.submit(std::move(throws));
  scheduler.submit(std::move(plain));
  held.wait();
  EXPECT_EQ(held.tokens, (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(error_of([&] { bad.wait(); }), "usage: no more");
  good.wait();
  EXPECT_EQ(good.tokens, expected.tokens);
}

// Compares with logits that are computed token by token: each occurrence of a token subtracts the frequency penalty,
// and a token that occurred subtracts the presence penalty once.
TEST(scheduler, penalties_are_subtracted_from_the_logits_of_earlier_tokens) {
  const ServedModel m;
  const auto decoder = m.decoder();
  Scheduler scheduler(*decoder);
  for (const auto& [frequency, presence] : {std::pair(0.75, 0.0), {0.0, 1.5}, {-0.5, 0.25}}) {
    Asked a;
    ServeRequest r = a.request(ids_of(1, 5), 30);
    r.frequency_penalty = frequency;
    r.presence_penalty = presence;
    scheduler.submit(std::move(r));
    a.wait();
    const auto reference = m.decoder();
    Sequence sequence(*reference);
    std::vector<int32_t> ids = ids_of(1, 5), sampled;
    std::vector<double> times(37);
    for (int i = 0; i < 30; ++i) {
      std::vector<float> logits;
      const auto take = [&](int64_t, const Tensor& t) {
        const Tensor row = t.row(t.size(0) - 1);
        logits.assign(row.ptr<float>(), row.ptr<float>() + 37);
      };
      sequence.extend(ids, Decoder::Rows::last, take);
      for (size_t v = 0; v < 37; ++v)
        if (times[v] > 0) logits[v] -= float(times[v] * frequency + presence);
      const auto best = std::max_element(logits.begin(), logits.end()) - logits.begin();
      sampled.push_back(int32_t(best));
      ids = {int32_t(best)};
      times[size_t(best)] += 1;
    }
    EXPECT_EQ(a.tokens, sampled) << frequency << " " << presence;
  }
}

TEST(scheduler, destroying_the_scheduler_ends_every_request_once) {
  const ServedModel m;
  const auto decoder = m.decoder(2);
  std::vector<Asked> asked(8);
  {
    Scheduler scheduler(*decoder);
    for (size_t i = 0; i < asked.size(); ++i) scheduler.submit(asked[i].request(ids_of(i, 30), 160));
  }
  for (Asked& a : asked) a.wait();
  EXPECT_EQ(decoder->open_slots(), 0);
}

}  // namespace
}  // namespace ingot
