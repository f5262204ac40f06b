// Draft steps with the guesses of a head on a GPU.
#ifdef INGOT_HAS_CUDA_DECODE
#include <gtest/gtest.h>

#include "ingot/models/draft/head/head_drafts.test.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

using namespace testing::head_drafts;

class HeadDraftsCuda : public testing::GpuTest<> {};

TEST_F(HeadDraftsCuda, TheAnswerIsThatOfDraftStepsWithoutGuesses) {
  const WithHead with(1, 0, true);
  Decoder& d = *with.decoder;
  ASSERT_TRUE(d.has_draft_head());
  if (d.draft_rows() == 1) GTEST_SKIP() << "an SM's memory has no room for draft steps";
  const int32_t stops[] = {4, 17, 30};
  SampleOptions greedy{.sampling = {.temperature = 0}}, stopped{.sampling = {.temperature = 1}, .seed = 11};
  stopped.stop_ids = stops, stopped.logprobs = 2;
  for (const SampleOptions& o : {greedy, stopped})
    for (const int64_t prompt : {1, 11}) {
      SCOPED_TRACE(detail::concat("prompt of ", prompt));
      const Ids told = ids_of(uint64_t(prompt), prompt);
      const Outcome want = answer(*with.plain, told, o, 24, [](const Ids&) { return Ids(); });
      int64_t place = 0;
      const Outcome found = answer(d, told, o, 24, [&](const Ids& t) {
        Ids draft = d.guess(0, 7);
        EXPECT_EQ(draft.size(), t.empty() ? 0u : 7u);
        if (++place % 2 == 0)  // some right tokens in place of guesses
          for (size_t i = 0; i < std::min<size_t>(draft.size(), 3) && t.size() + i < want.tokens.size(); ++i)
            draft[i] = want.tokens[t.size() + i];
        return draft;
      });
      EXPECT_EQ(found.tokens, want.tokens);
      EXPECT_EQ(found.logprobs, want.logprobs);
      EXPECT_EQ(found.finish, want.finish);
      EXPECT_EQ(found.stop_id, want.stop_id);
      EXPECT_EQ(found.length, want.length);
      EXPECT_GT(found.drafted, 3);
    }
}

// Guesses on a GPU differ from those on a CPU in near ties, from which the further guesses part.
TEST_F(HeadDraftsCuda, GuessesAreThoseOfTheCpuAfterStepsRewindsAndCopies) {
  const WithHead cpu(2, 4), gpu(2, 4, true);
  if (gpu.decoder->draft_rows() == 1) GTEST_SKIP() << "an SM's memory has no room for draft steps";
  const Ids prompt = ids_of(8, 20), next = ids_of(4, 7);
  int64_t equal = 0, all = 0;
  const auto compare = [&](Ids tokens, int slot) {
    // The same pending token for both.
    std::vector<uint32_t> only((kVocab + 31) / 32);
    const int32_t pending = int32_t(tokens.size() * 7 % kVocab);
    only[size_t(pending / 32)] = 1u << (pending % 32);
    SampleOptions o;
    o.allowed = only, o.drafting = true;
    Sequence fresh(*cpu.decoder);
    feed(fresh, tokens), fresh.sample(o, 1);
    gpu.decoder->sample(slot, o, 1);
    const Ids want = cpu.decoder->guess(fresh.slot(), 4), found = gpu.decoder->guess(slot, 4);
    ASSERT_EQ(found.size(), 4u);
    EXPECT_EQ(found, gpu.decoder->guess(slot, 4)) << "a second time";
    for (size_t i = 0; i < 4; ++i, ++all) equal += found[i] == want[i];
  };
  Sequence s(*gpu.decoder);
  feed(s, prompt);
  compare(prompt, s.slot());
  for (const int64_t length : {19, 20, 18, 3, 1}) {
    const int64_t kept = s.rewind(length);
    feed(s, next);
    compare(plus(Ids(prompt.begin(), prompt.begin() + kept), next), s.slot());
    s.rewind(0), feed(s, prompt);
  }
  Sequence copy(*gpu.decoder);
  ASSERT_EQ(gpu.decoder->copy_prefix(s.slot(), copy.slot(), 17), 17);
  feed(copy, next);
  compare(plus(Ids(prompt.begin(), prompt.begin() + 17), next), copy.slot());
  EXPECT_GE(equal, all * 3 / 4);
}

}  // namespace
}  // namespace ingot
#endif
