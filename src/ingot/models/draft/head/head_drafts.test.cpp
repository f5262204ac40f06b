// Draft steps with the guesses of a head: the answers are those of no drafts, and the guesses follow from the tokens of
// a slot alone. draft_steps.test.cpp has the drafts of all other kinds.
#include "ingot/models/draft/head/head_drafts.test.h"

#include <gtest/gtest.h>

namespace ingot {
namespace {

using namespace testing::head_drafts;

TEST(HeadDrafts, TheAnswerIsThatOfNoDrafts) {
  const WithHead with;
  Decoder& d = *with.decoder;
  ASSERT_TRUE(d.has_draft_head());
  ASSERT_FALSE(with.plain->has_draft_head());
  const int32_t stops[] = {4, 17, 30};
  SampleOptions greedy{.sampling = {.temperature = 0}}, drawn{.sampling = {.temperature = 1}, .seed = 11};
  SampleOptions filtered{.sampling = {.temperature = 1.5, .top_k = 3}, .seed = 2}, stopped = drawn, scored = drawn;
  stopped.stop_ids = stops, scored.logprobs = 2;
  int64_t drafted = 0;
  for (const SampleOptions& o : {greedy, drawn, filtered, stopped, scored})
    for (const int64_t prompt : {1, 6, 11})
      for (const int64_t tokens : {24, 500}) {
        SCOPED_TRACE(detail::concat("prompt of ", prompt, ", ", tokens, " tokens"));
        const Ids told = ids_of(uint64_t(prompt), prompt);
        const Outcome want = answer(*with.plain, told, o, tokens);
        const Outcome found = answer(d, told, o, tokens, [&](const Ids&) { return d.guess(0, 7); });
        EXPECT_EQ(found.tokens, want.tokens);
        EXPECT_EQ(found.logprobs, want.logprobs);
        EXPECT_EQ(found.finish, want.finish);
        EXPECT_EQ(found.stop_id, want.stop_id);
        EXPECT_EQ(found.length, want.length);
        drafted += found.drafted;
      }
  EXPECT_GT(drafted, 1000);
}

// The guesses for these tokens in a slot that has seen nothing else; the last token is pending.
Ids fresh_guess(Decoder& d, const Ids& tokens, int64_t most) {
  Sequence s(d);
  feed(s, Ids(tokens.begin(), tokens.end() - 1));
  std::vector<uint32_t> only((kVocab + 31) / 32);
  only[size_t(tokens.back() / 32)] = 1u << (tokens.back() % 32);
  SampleOptions o;
  o.allowed = only;
  s.sample(o, 1);
  return d.guess(s.slot(), most);
}

TEST(HeadDrafts, GuessesFollowFromTheTokensOfTheSlotAlone) {
  for (const int64_t window : {0, 4}) {
    const WithHead with(2, window);
    Decoder& d = *with.decoder;
    const Ids prompt = ids_of(8, 9);
    const SampleOptions o{.sampling = {.temperature = 1}, .seed = 11};
    const Ids want = answer(d, prompt, o, 40).tokens;
    int64_t compared = 0;
    // Some guesses are replaced by right tokens, so that drafts are accepted in part.
    const Outcome found = answer(d, prompt, o, 40, [&](const Ids& t) {
      Ids draft = d.guess(0, 7);
      if (t.empty()) EXPECT_TRUE(draft.empty()) << "the slot has no pending token yet";
      if (t.empty()) return draft;
      EXPECT_EQ(draft, fresh_guess(d, plus(prompt, t), 7)) << t.size() << " tokens";
      EXPECT_EQ(draft, d.guess(0, 7)) << "a second time";
      ++compared;
      for (size_t i = 0; i < std::min(draft.size(), t.size() % 4) && t.size() + i < want.size(); ++i)
        draft[i] = want[t.size() + i];
      return draft;
    });
    EXPECT_EQ(found.tokens, want);
    EXPECT_GT(found.accepted, 10);
    EXPECT_GT(compared, 10);
  }
}

TEST(HeadDrafts, GuessesAfterARewindACheckpointAndACopyAreThoseOfTheTokens) {
  const WithHead with(3);
  Decoder& d = *with.decoder;
  const Ids prompt = ids_of(3, 20), next = ids_of(4, 7);
  Sequence s(d);
  feed(s, prompt);
  s.checkpoint();
  const auto expect_guess = [&](Sequence& slot, const Ids& tokens) {
    const Ids pending = slot.sample({.sampling = {.temperature = 0}}, 1).tokens;
    EXPECT_EQ(d.guess(slot.slot(), 5), fresh_guess(d, plus(tokens, pending), 5)) << tokens.size() << " tokens";
  };
  expect_guess(s, prompt);
  for (const int64_t length : {18, 20, 20, 3, 1}) {
    // Another conversation goes on from there.
    const int64_t kept = s.rewind(length);
    feed(s, next);
    expect_guess(s, plus(Ids(prompt.begin(), prompt.begin() + kept), next));
    s.rewind(0), feed(s, prompt);
  }
  Sequence copy(d);
  ASSERT_EQ(d.copy_prefix(s.slot(), copy.slot(), 17), 17);
  feed(copy, next);
  expect_guess(copy, plus(Ids(prompt.begin(), prompt.begin() + 17), next));
}

TEST(HeadDrafts, GuessesEndWhereTheContextEnds) {
  const WithHead with;
  Decoder& d = *with.decoder;
  Sequence s(d), without(*with.plain);
  EXPECT_TRUE(d.guess(s.slot(), 5).empty()) << "an empty slot";
  for (Sequence* of : {&s, &without}) feed(*of, ids_of(1, kContext - 4));
  EXPECT_TRUE(d.guess(s.slot(), 5).empty()) << "no pending token";
  for (Sequence* of : {&s, &without}) of->sample({.sampling = {.temperature = 0}}, 1);
  EXPECT_EQ(d.guess(s.slot(), 5).size(), 3u);
  EXPECT_TRUE(d.guess(s.slot(), 0).empty());
  EXPECT_TRUE(with.plain->guess(without.slot(), 5).empty()) << "no head";
}

TEST(HeadDrafts, TheCostsOfStepsIncludeThatOfAGuess) {
  const WithHead with;
  Sequence s(*with.decoder);
  const draft::StepCosts costs = draft::measure_step_costs(*with.decoder, s.slot(), 4);
  EXPECT_GT(costs.of_drafts(draft::Source::head, 2), costs.of_drafts(draft::Source::lookup, 2));
  EXPECT_EQ(costs.of_drafts(draft::Source::lookup, 2), costs(3));
  EXPECT_EQ(s.length(), 0);
}

TEST(AnswerDrafts, TheHeadGuessesWhereLookupHasNoLongMatch) {
  const Ids period = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  int64_t asked = 0;
  draft::AnswerDrafts drafts(draft::make_lookup({}), draft::DraftPolicy(draft::StepCosts({1, 1.1, 1.2, 1.3, 1.4}), 4),
                             [&](int64_t most) {
                               asked = most;
                               return Ids(size_t(most), 30);
                             });
  drafts.append(period);
  const auto next = [&](int32_t id) {
    asked = 0;
    drafts.choose(10);
    const Ids draft(drafts.draft().begin(), drafts.draft().end());
    drafts.learn({.tokens = {id}});
    return draft;
  };
  for (const int32_t id : {1, 2, 3, 4, 5, 6, 7, 8}) {
    EXPECT_EQ(next(id), Ids(4, 30)) << "before " << id << ", after a short match";
    EXPECT_EQ(asked, 4);
  }
  EXPECT_EQ(next(9), (Ids{9, 10, 1, 2})) << "after a match of eight tokens";
  EXPECT_EQ(asked, 0);
}

}  // namespace
}  // namespace ingot
