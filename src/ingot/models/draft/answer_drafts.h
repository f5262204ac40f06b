#pragma once
// The drafts of one answer: a drafter, the engine's draft head if there is one, the policy, and counts. A caller of
// Decoder::sample() takes the draft of each step from here and reports the step's result.
#include <functional>
#include <memory>
#include <optional>

#include "ingot/models/decoder.h"
#include "ingot/models/draft/drafter.h"
#include "ingot/models/draft/policy.h"

namespace ingot::draft {

struct Options {
  // Makes the drafter of an answer, from tokens that the answer is predicted to contain (often none). Empty: no drafts.
  std::function<std::unique_ptr<Drafter>(std::vector<int32_t> prediction)> make;
  int64_t most = 7;  // tokens of a draft
  // Whether all steps of an answer, even steps without a draft, take the engine's path of draft steps. On every engine
  // the tokens then do not depend on the drafts. Otherwise a step without a draft takes the engine's fastest path,
  // which on a GPU rounds differently from a draft step.
  bool exact = false;
  std::vector<double> step_costs;  // of 1, 2, ... rows; empty: measured before the first answer
};
// Options::make of drafts by lookup.
std::unique_ptr<Drafter> make_lookup(std::vector<int32_t> prediction);

struct Counts {
  int64_t drafts = 0;                             // steps with at least one draft token
  int64_t tokens = 0, accepted = 0;               // draft tokens that steps computed; of these, tokens of the answer
  std::vector<int64_t> accepted_at;               // by position in the draft
  int64_t predicted = 0, predicted_accepted = 0;  // the part of `tokens` and `accepted` that a prediction gave
};

// T(k) of k = 1, 2, ... draft_rows(), at most `most` + 1, and the time of a guess, measured by steps of the open slot,
// which is empty afterwards. T(1) is that of Options::exact, or that of a step without drafts.
StepCosts measure_step_costs(Decoder& decoder, int slot, int64_t most, bool exact = false);
// Sets `costs` to those of the options; where these have none and `costs` is empty, measures them. Returns whether
// steps were measured: the slot is then empty.
bool find_step_costs(std::optional<StepCosts>& costs, const Options& options, Decoder& decoder, int slot);

// Guesses of the tokens after a slot's pending token.
using Guess = std::function<std::vector<int32_t>(int64_t most)>;
Guess guess_of_head(Decoder& decoder, int slot);  // empty where the engine has no draft head

class AnswerDrafts {
 public:
  // With `head`, guesses of the head replace short matches of the drafter. After a long match, and within a prediction,
  // the matched text is a better guess than the head's.
  AnswerDrafts(std::unique_ptr<Drafter> drafter, const DraftPolicy& policy, Guess head = {});
  void append(std::span<const int32_t> ids) { drafter_->append(ids); }  // of the prompt
  // Chooses the draft of the next step, of at most `room` tokens. `answers` answers share the step.
  void choose(int64_t room, int64_t answers = 1);
  std::span<const int32_t> draft() const { return draft_.tokens; }
  // Whether the step after this one is expected to have no draft either, because the policy refuses the drafts.
  bool expects_none() const { return refused_ && policy_.refuses_next(draft_.source); }
  void shorten(size_t tokens) { draft_.tokens.resize(std::min(tokens, draft_.tokens.size())); }
  void learn(const Sampled& step);  // the result of the step with draft()
  const Counts& counts() const { return counts_; }

 private:
  std::unique_ptr<Drafter> drafter_;
  Guess head_;
  DraftPolicy policy_;
  Draft draft_;
  bool refused_ = false;  // there was a guess for the chosen draft, and the policy took none
  Counts counts_;
};

}  // namespace ingot::draft
