#include "ingot/models/draft/answer_drafts.h"

#include <algorithm>
#include <cmath>

#include "ingot/core/clock.h"
#include "ingot/models/draft/lookup.h"

namespace ingot::draft {

std::unique_ptr<Drafter> make_lookup(std::vector<int32_t> prediction) {
  return std::make_unique<LookupDrafter>(std::move(prediction));
}

namespace {

// Seconds of `work` in a slot with a pending token.
template <class Work> double time_with_pending(Decoder& decoder, int slot, const Work& work) {
  const int32_t first[] = {0};
  SampleOptions o{.sampling = {.temperature = 0}};
  o.drafting = true;
  decoder.rewind(slot, 0);
  decoder.extend(slot, first);
  decoder.sample(slot, o, 1);
  const auto start = Clock::now();
  work(o);
  return seconds_since(start);
}
// Seconds of a step of `rows` tokens; a step of one row is a draft step if `exact`.
double time_step(Decoder& decoder, int slot, int64_t rows, bool exact) {
  // The tokens of the measured draft differ, because rows of equal tokens would choose equal experts.
  std::vector<int32_t> draft;
  for (int64_t i = 1; i < rows; ++i) draft.push_back(int32_t((i * 7919 + 13) % decoder.vocab()));
  return time_with_pending(decoder, slot, [&](SampleOptions& o) {
    o.draft = draft, o.drafting = exact || rows > 1;
    decoder.sample(slot, o, rows);
  });
}
// Seconds of a guess of the engine's draft head; 0 without one.
double time_guess(Decoder& decoder, int slot, int64_t most) {
  if (!decoder.has_draft_head() || most < 1) return 0;
  double best = HUGE_VAL;
  int64_t guesses = 1;
  for (int run = 0; run < 3; ++run)
    best = std::min(best, time_with_pending(decoder, slot, [&](SampleOptions&) {
                      guesses = std::max<int64_t>(1, int64_t(decoder.guess(slot, most).size()));
                    }));
  return best / double(guesses);
}

}  // namespace

StepCosts measure_step_costs(Decoder& decoder, int slot, int64_t most, bool exact) {
  constexpr int kMostRuns = 5;
  constexpr double kEnough = 0.03;  // seconds per number of rows
  const int64_t rows = std::min({decoder.draft_rows(), most + 1, decoder.context() - 1});
  INGOT_CHECK_GE(rows, int64_t(1), "draft: rows of a step");
  std::vector<double> costs(static_cast<size_t>(rows));
  time_step(decoder, slot, 1, exact);  // the first step also loads pages and code
  int64_t measured = 0;
  for (int64_t k = 1;; k = std::min(2 * k, rows)) {
    double best = HUGE_VAL, total = 0;
    if (decoder.device().kind == Device::cuda) time_step(decoder, slot, k, exact);  // records the CUDA graph of k rows
    for (int run = 0; run < kMostRuns && total < kEnough; ++run) {
      const double seconds = std::max(1e-9, time_step(decoder, slot, k, exact));
      best = std::min(best, seconds), total += seconds;
    }
    // More rows are taken to need at least as much time. The time is interpolated linearly between two measured numbers
    // of rows.
    const double before = measured > 0 ? costs[size_t(measured - 1)] : best;
    best = std::max(best, before);
    for (int64_t i = measured + 1; i <= k; ++i)
      costs[size_t(i - 1)] = before + (best - before) * double(i - measured) / double(k - measured);
    measured = k;
    if (k == rows) break;
  }
  const double of_guess = time_guess(decoder, slot, rows - 1);
  decoder.rewind(slot, 0);
  return StepCosts(std::move(costs), of_guess);
}

bool find_step_costs(std::optional<StepCosts>& costs, const Options& options, Decoder& decoder, int slot) {
  if (!options.step_costs.empty()) {
    const int64_t rows = std::min(decoder.draft_rows(), int64_t(options.step_costs.size()));
    costs.emplace(std::vector(options.step_costs.begin(), options.step_costs.begin() + rows));
  }
  if (costs) return false;
  costs = measure_step_costs(decoder, slot, options.most, options.exact);
  return true;
}

Guess guess_of_head(Decoder& decoder, int slot) {
  if (!decoder.has_draft_head()) return {};
  return [&decoder, slot](int64_t most) { return decoder.guess(slot, most); };
}

AnswerDrafts::AnswerDrafts(std::unique_ptr<Drafter> drafter, const DraftPolicy& policy, Guess head)
    : drafter_(std::move(drafter)), head_(std::move(head)), policy_(policy) {
  counts_.accepted_at.resize(size_t(policy_.most()));
}

void AnswerDrafts::choose(int64_t room, int64_t answers) {
  const int64_t most = std::min(room, policy_.most());
  draft_ = drafter_->draft(most);
  if (head_ && draft_.source == Source::lookup) {
    // The head takes time for each guess, so the number of guesses is chosen before they are made.
    const int64_t guesses = policy_.choose(Source::head, most, answers);
    draft_ = {.source = Source::head};
    refused_ = most > 0 && guesses == 0;
    if (guesses > 0) draft_.tokens = head_(guesses);
    return;
  }
  const size_t guessed = draft_.tokens.size();
  shorten(size_t(policy_.choose(draft_.source, int64_t(guessed), answers)));
  refused_ = guessed > 0 && draft_.tokens.empty();
}

void AnswerDrafts::learn(const Sampled& step) {
  drafter_->append(step.tokens);
  const int64_t drafted = step.drafted, accepted = step.accepted;
  if (drafted == 0) return;
  // Where the answer ended at an accepted token, nothing was compared after it; else the next draft token was rejected.
  const bool rejected = accepted < drafted && (step.stop_id >= 0 || int64_t(step.tokens.size()) > accepted);
  policy_.learn(draft_.source, accepted + (rejected ? 1 : 0), accepted);
  ++counts_.drafts;
  counts_.tokens += drafted, counts_.accepted += accepted;
  for (int64_t i = 0; i < accepted; ++i) ++counts_.accepted_at[size_t(i)];
  if (draft_.source == Source::prediction) counts_.predicted += drafted, counts_.predicted_accepted += accepted;
}

}  // namespace ingot::draft
