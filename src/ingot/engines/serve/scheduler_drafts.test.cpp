// Requests with drafts: the answers are those without drafts.
#include <gtest/gtest.h>

#include "ingot/engines/serve/scheduler_requests.test.h"
#include "ingot/models/decode/model/decoder.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using testing::Asked;
using testing::ids_of;
using testing::ServedModel;

// Drafts whose price always pays.
ServeOptions drafting(DraftWhich which = DraftWhich::all) {
  return {
      .drafted = which,
      .draft = {.make = draft::make_lookup, .most = 7, .step_costs = {1, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07}}};
}
struct Got {
  std::vector<int32_t> tokens;
  std::vector<double> logprobs;
  ServeOutcome outcome;
};
using Change = std::function<void(ServeRequest&, Asked&)>;
Got got(const ServedModel& m, const ServeOptions& options, const Change& change, ServeCounts* counts = nullptr) {
  const auto decoder = m.decoder(2);
  Scheduler scheduler(*decoder, options);
  Asked a;
  ServeRequest r = a.request(ids_of(1, 9), 60);
  change(r, a);
  scheduler.submit(std::move(r));
  Got all;
  all.outcome = a.wait();
  all.tokens = a.tokens;
  for (const TokenLogprobs& p : a.logprobs) all.logprobs.push_back(p.sampled);
  if (counts != nullptr) *counts = scheduler.counts();
  return all;
}

TEST(scheduler_drafts, drafts_change_no_answer_with_any_options) {
  const ServedModel m;
  const std::pair<const char*, Change> changes[] = {
      {"greedy", [](ServeRequest&, Asked&) {}},
      {"temperature", [](ServeRequest& r, Asked&) { r.sampling.temperature = 0.7, r.seed = 5; }},
      {"penalties", [](ServeRequest& r,
                       Asked&) { r.frequency_penalty = 0.4, r.presence_penalty = -0.3, r.sampling.temperature = 1; }},
      {"negative penalties, which repeat tokens", [](ServeRequest& r, Asked&) { r.frequency_penalty = -1; }},
      {"logprobs", [](ServeRequest& r, Asked&) { r.logprobs = 2; }},
      {"biases",
       [](ServeRequest& r, Asked&) {
         r.bias = {{3, 2.f}, {5, -50.f}};
         r.sampling.temperature = 0.5;
       }},
      {"a stop id",
       [](ServeRequest& r, Asked&) {
         r.stop_ids = {7, 21}, r.sampling.temperature = 1;
       }},
      {"a mask that changes with every token",
       [](ServeRequest& r, Asked& a) {
         r.sampling.temperature = 0.5;
         r.allowed = [&a](std::span<const int32_t> draft) {
           // The ids that are allowed depend on whether the number of tokens so far is even.
           std::vector<ServeRequest::Mask> masks;
           for (size_t n = a.tokens.size();; ++n) {
             auto mask = std::make_shared<std::vector<uint32_t>>(2);
             for (size_t id = 0; id < 37; ++id)
               if (id % 4 != n % 2) (*mask)[id / 32] |= 1u << (id % 32);
             masks.push_back(mask);
             const size_t i = masks.size() - 1;
             if (i == draft.size() || ((*mask)[size_t(draft[i] / 32)] >> (draft[i] % 32) & 1) == 0) return masks;
           }
         };
       }},
      {"a stop of the caller in the middle of a draft",
       [](ServeRequest& r, Asked& a) {
         r.on_token = [&a](int32_t id, const TokenLogprobs*) {
           a.tokens.push_back(id);
           return a.tokens.size() < 23;
         };
       }},
  };
  int64_t accepted = 0, tried = 0;
  for (const auto& [name, change] : changes) {
    SCOPED_TRACE(name);
    ServeOptions options = drafting();
    options.draft.exact = tried++ % 2 == 0;
    const Got want = got(m, {}, change), found = got(m, options, change);
    EXPECT_EQ(found.tokens, want.tokens);
    EXPECT_EQ(found.logprobs, want.logprobs);
    EXPECT_EQ(found.outcome.finish, want.outcome.finish);
    EXPECT_EQ(found.outcome.stop_id, want.outcome.stop_id);
    EXPECT_EQ(found.outcome.tokens, want.outcome.tokens);
    EXPECT_EQ(want.outcome.drafts.tokens, 0);
    accepted += found.outcome.drafts.accepted;
  }
  EXPECT_GT(accepted, 20);
}

TEST(scheduler_drafts, the_next_request_of_a_client_finds_the_tokens_that_a_drafted_answer_kept) {
  const ServedModel m;
  for (const size_t stop : {5, 17, 24, 33}) {
    std::vector<int32_t> answers[2];
    int64_t reused[2] = {};
    for (const bool drafts : {false, true}) {
      const auto decoder = m.decoder();
      Scheduler scheduler(*decoder, drafts ? drafting() : ServeOptions());
      Asked first, second;
      ServeRequest r = first.request(ids_of(1, 9), 60);
      r.on_token = [&](int32_t id, const TokenLogprobs*) {
        first.tokens.push_back(id);
        return first.tokens.size() < stop;
      };
      scheduler.submit(std::move(r));
      first.wait();
      EXPECT_EQ(first.tokens.size(), stop);
      std::vector<int32_t> next = ids_of(1, 9);
      next.insert(next.end(), first.tokens.begin(), first.tokens.end());
      next.push_back(3);
      scheduler.submit(second.request(next, 20));
      reused[drafts] = second.wait().reused;
      answers[drafts] = second.tokens;
    }
    EXPECT_EQ(answers[1], answers[0]);
    EXPECT_GE(reused[1], reused[0]) << "an accepted last token has been fed already";
  }
}

TEST(scheduler_drafts, a_prediction_gives_drafts_and_by_default_only_requests_with_a_prediction_have_drafts) {
  const ServedModel m;
  const Change hot = [](ServeRequest& r, Asked&) { r.sampling.temperature = 1.5, r.seed = 3; };
  const Got want = got(m, drafting(DraftWhich::none), hot);
  const Change predicted = [&](ServeRequest& r, Asked& a) {
    hot(r, a);
    // The end of the prompt finds the place.
    r.prediction = {r.prompt.end() - 4, r.prompt.end()};
    r.prediction.insert(r.prediction.end(), want.tokens.begin(), want.tokens.end());
  };
  ServeCounts counts;
  const Got found = got(m, drafting(DraftWhich::predicted), predicted, &counts);
  EXPECT_EQ(found.tokens, want.tokens);
  EXPECT_GT(found.outcome.drafts.predicted_accepted, 45);
  EXPECT_EQ(counts.accepted_tokens, found.outcome.drafts.accepted);
  EXPECT_EQ(counts.draft_tokens, found.outcome.drafts.tokens);
  EXPECT_EQ(counts.drafts, found.outcome.drafts.drafts);
  EXPECT_EQ(counts.accepted_at, found.outcome.drafts.accepted_at);
  EXPECT_EQ(got(m, drafting(DraftWhich::predicted), hot).outcome.drafts.tokens, 0);
  EXPECT_EQ(got(m, drafting(DraftWhich::none), predicted).outcome.drafts.tokens, 0);
}

#ifdef INGOT_HAS_CUDA_DECODE
// On a GPU drafted answers share the rows of a step.
TEST(scheduler_drafts, drafted_answers_of_a_gpu_are_the_same_alone_and_side_by_side) {
  if (gpu::device_count() == 0) GTEST_SKIP() << "no GPU";
  const ServedModel m;
  const auto decoder =
      make_gpu_decoder(m.config, m.weights, {.context = 200, .batch = 8, .slots = 4, .batched_sequences = true});
  if (decoder->draft_rows() == 1) GTEST_SKIP() << "an SM's memory has no room for draft steps";
  ServeOptions options = drafting();
  options.draft.exact = true;
  const auto ask = [](Asked& a, size_t i) {
    std::vector<int32_t> prompt = ids_of(i, 9);
    prompt.insert(prompt.end(), prompt.begin(), prompt.end());
    ServeRequest r = a.request(prompt, 16);
    if (i > 0) r.sampling.temperature = 0.5, r.seed = i, r.logprobs = 1;
    if (i == 2) r.frequency_penalty = -1;
    if (i == 3) r.tokens = 7;
    return r;
  };
  std::vector<Asked> alone(4), together(4);
  for (size_t i = 0; i < 4; ++i) {
    Scheduler scheduler(*decoder, options);
    scheduler.submit(ask(alone[i], i));
    alone[i].wait();
  }
  Scheduler scheduler(*decoder, options);
  for (size_t i = 0; i < 4; ++i) scheduler.submit(ask(together[i], i));
  int64_t accepted = 0;
  for (size_t i = 0; i < 4; ++i) {
    accepted += together[i].wait().drafts.accepted;
    EXPECT_EQ(together[i].tokens, alone[i].tokens) << "request " << i;
    ASSERT_EQ(together[i].logprobs.size(), alone[i].logprobs.size());
    // The first token comes from the prompt, and the head of several prompts rounds differently from that of one.
    for (size_t t = 1; t < alone[i].logprobs.size(); ++t)
      EXPECT_EQ(together[i].logprobs[t].sampled, alone[i].logprobs[t].sampled) << "request " << i << ", token " << t;
  }
  EXPECT_GT(accepted, 0);
}
#endif

TEST(scheduler_drafts, nothing_is_drafted_from_the_text_of_another_client) {
  const ServedModel m;
  const auto ask = [](Scheduler& scheduler, const std::vector<int32_t>& prompt, const char* client) {
    Asked a;
    ServeRequest r = a.request(prompt, 40, client);
    r.sampling.temperature = 2, r.seed = 3;
    scheduler.submit(std::move(r));
    const ServeOutcome o = a.wait();
    return std::pair(a.tokens, o.drafts);
  };
  const auto decoder = m.decoder(2), other = m.decoder(2);
  Scheduler shared(*decoder, drafting()), fresh(*other, drafting());
  const std::vector<int32_t> text = ask(shared, ids_of(1, 9), "a").first;
  const std::vector<int32_t> prompt(text.begin() + 10, text.begin() + 16);  // whose continuation is in a's answer
  const auto found = ask(shared, prompt, "b"), want = ask(fresh, prompt, "b");
  EXPECT_EQ(found.first, want.first);
  EXPECT_EQ(found.second.tokens, want.second.tokens);
  EXPECT_EQ(found.second.drafts, want.second.drafts);
}

}  // namespace
}  // namespace ingot
