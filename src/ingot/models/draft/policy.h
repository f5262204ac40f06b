#pragma once
// How many drafted tokens a step checks. A step of k rows costs T(k); with n drafts the step yields on average
//   E(n) = 1 + a1 + a1 a2 + ... + a1 ... an     tokens,
// where ai is the share of i-th drafts accepted among those whose predecessors were accepted. The policy takes the n
// with the largest E(n) / T(n + 1), and none where no n is better than a step without drafts. Shares are averages in
// which old drafts count less and less. The policy reads no clock: T is a table, measured before the answer. Where m
// answers share a step, each with n drafts, the step costs T(m (n + 1)). The time of the engine's draft head is added
// for each of its guesses.
#include <array>
#include <vector>

#include "ingot/models/draft/drafter.h"

namespace ingot::draft {

// T(k) of k = 1, 2, ... rows, and the time of a guess of the engine's draft head, in any unit.
class StepCosts {
 public:
  explicit StepCosts(std::vector<double> of_rows, double of_guess = 0);  // positive numbers, at least one row
  int64_t most_rows() const { return int64_t(of_rows_.size()); }
  double operator()(int64_t rows) const { return of_rows_[size_t(rows - 1)]; }
  // The cost of a step that checks drafts of `tokens` tokens of several answers, and of making these drafts.
  double of_drafts(Source source, int64_t tokens, int64_t answers = 1) const {
    return (*this)(answers * (tokens + 1)) + (source == Source::head ? double(answers * tokens) * of_guess_ : 0);
  }

 private:
  std::vector<double> of_rows_;
  double of_guess_;
};

class DraftPolicy {
 public:
  // `most`: the longest draft, if the costs have a row for each of its tokens and one more.
  DraftPolicy(StepCosts costs, int64_t most);
  // How many tokens of a draft of `available` tokens the next step should check, which `answers` answers share. Called
  // once a step.
  int64_t choose(Source source, int64_t available, int64_t answers = 1);
  // A step compared the first `compared` tokens of a draft with the sampled ones and accepted `accepted` of these: all
  // of them, or all but the last.
  void learn(Source source, int64_t compared, int64_t accepted);
  // Whether the next choice of this source is already known to be no draft.
  bool refuses_next(Source source) const;
  double accepted_share(Source source, int64_t position) const;  // a of position 1, 2, ...
  int64_t most() const { return most_; }

 private:
  struct Position {
    double tried = 0, accepted = 0;
  };
  struct Record {
    std::vector<Position> positions;
    int64_t refused = 0;  // steps in a row without drafts, although there was a draft
  };
  Record& record(Source s) { return records_[size_t(s)]; }
  StepCosts costs_;
  int64_t most_;
  std::array<Record, kSources> records_;
};

}  // namespace ingot::draft
