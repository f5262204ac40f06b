#include "ingot/models/draft/policy.h"

#include <algorithm>

#include "ingot/core/check.h"

namespace ingot::draft {
namespace {
constexpr double kFirstGuess = 0.75;  // the share of position 1 before the first draft
constexpr double kGuessWeight = 1;    // the weight of the first guess, in drafts
constexpr double kForgets = 0.9;      // the weight of earlier drafts after each new one
constexpr int64_t kProbeSteps = 64;   // steps without drafts before one draft is tried again
constexpr int64_t kProbeDrafts = 3;   // tokens of that draft
// the share of the record that a probe keeps, so that an old failure does not outweigh the probe
constexpr double kKeptByProbe = 0.25;
}  // namespace

StepCosts::StepCosts(std::vector<double> of_rows, double of_guess) : of_rows_(std::move(of_rows)), of_guess_(of_guess) {
  INGOT_CHECK(!of_rows_.empty() && std::all_of(of_rows_.begin(), of_rows_.end(), [](double t) { return t > 0; }),
              "draft: found costs of ", of_rows_.size(), " numbers of rows, expected positive costs from one row on");
  INGOT_CHECK(of_guess_ >= 0, "draft: found a cost of ", of_guess_, " for a guess, expected at least 0");
}

DraftPolicy::DraftPolicy(StepCosts costs, int64_t most)
    : costs_(std::move(costs)), most_(std::clamp<int64_t>(most, 0, costs_.most_rows() - 1)) {
  for (Record& r : records_) r.positions.resize(size_t(most_));
}

// The average of a position begins at the average of the preceding position.
double DraftPolicy::accepted_share(Source source, int64_t position) const {
  double share = kFirstGuess;
  for (int64_t i = 0; i < position; ++i) {
    const Position& p = records_[size_t(source)].positions[size_t(i)];
    share = (p.accepted + kGuessWeight * share) / (p.tried + kGuessWeight);
  }
  return share;
}

int64_t DraftPolicy::choose(Source source, int64_t available, int64_t answers) {
  available = std::min({available, most_, costs_.most_rows() / answers - 1});
  if (available <= 0) return 0;
  int64_t best = 0;
  double tokens = 1, all_accepted = 1, best_rate = 1 / costs_(answers);
  for (int64_t n = 1; n <= available; ++n) {
    all_accepted *= accepted_share(source, n);
    tokens += all_accepted;
    const double rate = tokens / costs_.of_drafts(source, n, answers);
    if (rate > best_rate) best = n, best_rate = rate;
  }
  Record& r = record(source);
  if (best > 0) {
    r.refused = 0;
  } else if (++r.refused >= kProbeSteps) {
    r.refused = 0;
    best = std::min(available, kProbeDrafts);
    for (Position& p : r.positions) p.tried *= kKeptByProbe, p.accepted *= kKeptByProbe;
  }
  return best;
}

// Shares change only with drafts.
bool DraftPolicy::refuses_next(Source source) const {
  const int64_t refused = records_[size_t(source)].refused;
  return refused > 0 && refused + 1 < kProbeSteps;
}

void DraftPolicy::learn(Source source, int64_t compared, int64_t accepted) {
  INGOT_CHECK(accepted >= 0 && accepted <= compared && compared <= std::min(accepted + 1, most_), "draft: found ",
              accepted, " accepted of ", compared, " compared tokens, expected all or all but the last, of at most ",
              most_);
  for (int64_t i = 0; i < compared; ++i) {
    Position& p = record(source).positions[size_t(i)];
    p.tried = kForgets * p.tried + 1;
    p.accepted = kForgets * p.accepted + (i < accepted ? 1 : 0);
  }
}

}  // namespace ingot::draft
