#include "ingot/models/draft/policy.h"

#include <gtest/gtest.h>

#include <random>

#include "ingot/testing/temporary_directory.h"

namespace ingot::draft {
namespace {

using testing::error_of;

StepCosts rising(double per_row, int64_t rows = 16) {
  std::vector<double> of;
  for (int64_t k = 0; k < rows; ++k) of.push_back(1 + per_row * double(k));
  return StepCosts(of);
}

struct Speed {
  double tokens = 0, time = 0, drafted = 0;
  double rate() const { return tokens / time; }  // tokens per unit of time
};
// Simulates steps with drafts. Each token of a draft is accepted with probability p if all tokens before it were.
Speed simulate(DraftPolicy& policy, const StepCosts& costs, double p, int steps, unsigned seed,
               int64_t available = 15) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform;
  Speed run;
  for (int i = 0; i < steps; ++i) {
    const int64_t n = policy.choose(Source::lookup, available);
    int64_t accepted = 0;
    while (accepted < n && uniform(random) < p) ++accepted;
    policy.learn(Source::lookup, std::min(n, accepted + 1), accepted);
    run.tokens += double(accepted + 1), run.time += costs(n + 1), run.drafted += double(n);
  }
  return run;
}
// The best of all fixed numbers of drafts.
double best_fixed(const StepCosts& costs, double p) {
  double best = 0, tokens = 0, power = 1;
  for (int64_t n = 0; n < costs.most_rows(); ++n, power *= p) {
    tokens += power;
    best = std::max(best, tokens / costs(n + 1));
  }
  return best;
}

TEST(DraftPolicy, AnswersThatShareAStepShareItsRows) {
  // 16 rows: m answers with n drafts each fit while m (n + 1) <= 16, and pay at these costs wherever they fit.
  for (const auto& [answers, most] :
       {std::pair<int64_t, int64_t>{1, 15}, {2, 7}, {3, 4}, {5, 2}, {8, 1}, {9, 0}, {40, 0}})
    EXPECT_EQ(DraftPolicy(rising(0.001), 15).choose(Source::lookup, 15, answers), most) << answers << " answers";
  // One draft, accepted with 0.75, yields 1.75 tokens. Steps of 5 and of 10 rows cost 2 and 3.25 where a row costs
  // 0.25, and steps of 4 and of 8 rows cost 4 and 8 where a row costs 1.
  EXPECT_EQ(DraftPolicy(rising(0.25), 1).choose(Source::lookup, 1, 5), 1);
  EXPECT_EQ(DraftPolicy(rising(1), 1).choose(Source::lookup, 1, 4), 0);
}

// One draft, accepted with 0.75, yields 1.75 tokens.
TEST(DraftPolicy, ADraftThatIsNoBetterThanASingleStepIsNotMade) {
  EXPECT_EQ(DraftPolicy(rising(0.75), 1).choose(Source::lookup, 1), 0);
  EXPECT_EQ(DraftPolicy(rising(0.7499), 1).choose(Source::lookup, 1), 1);
}

TEST(DraftPolicy, TheSharesAreThoseOfTheRecordCountedByHand) {
  DraftPolicy policy(rising(0.1), 3);
  EXPECT_DOUBLE_EQ(policy.accepted_share(Source::lookup, 1), 0.75);
  EXPECT_DOUBLE_EQ(policy.accepted_share(Source::lookup, 2), 0.75);
  policy.learn(Source::lookup, 3, 2);
  policy.learn(Source::lookup, 1, 0);
  const double first = (0.9 + 0.75) / (0.9 + 1 + 1), second = (1 + first) / 2, third = (0 + second) / 2;
  EXPECT_DOUBLE_EQ(policy.accepted_share(Source::lookup, 1), first);
  EXPECT_DOUBLE_EQ(policy.accepted_share(Source::lookup, 2), second);
  EXPECT_DOUBLE_EQ(policy.accepted_share(Source::lookup, 3), third);
  EXPECT_DOUBLE_EQ(policy.accepted_share(Source::prediction, 1), 0.75) << "another source has its own record";
}

TEST(DraftPolicy, GuessesOfTheHeadHaveTheirPrice) {
  // Steps of more rows cost nothing more: as many guesses as a guess is worth, however many are offered.
  for (const auto& [of_guess, expected] : {std::pair{0.0, 4}, {0.2, 3}, {0.5, 1}, {0.8, 0}}) {
    DraftPolicy policy(StepCosts({1, 1, 1, 1, 1}, of_guess), 4);
    EXPECT_EQ(policy.choose(Source::head, 10), expected) << "at " << of_guess;
    EXPECT_EQ(policy.choose(Source::lookup, 10), 4) << "lookup costs nothing";
  }
  EXPECT_NE(error_of([] { StepCosts({1}, -1); }).find("a cost of -1 for a guess"), std::string::npos);
}

TEST(DraftPolicy, ComesNearTheBestFixedNumberOfDraftsForEveryShareAndCost) {
  for (const double per_row : {0.02, 0.1, 0.3, 0.6})
    for (const double p : {0.3, 0.5, 0.8, 0.95, 1.0}) {
      const StepCosts costs = rising(per_row);
      DraftPolicy policy(costs, 15);
      const Speed run = simulate(policy, costs, p, 4000, 1);
      EXPECT_GT(run.rate(), 0.9 * best_fixed(costs, p)) << per_row << " " << p;
    }
}

TEST(DraftPolicy, RejectedDraftsCostAtMostFivePercent) {
  // T(2) is 2.03 times T(1), as published for one GPU.
  for (const StepCosts& costs : {StepCosts({1.49, 3.03, 3.4, 3.89, 4.3, 4.7, 5.1, 5.42}), rising(0.6), rising(0.1)}) {
    DraftPolicy policy(costs, 7);
    EXPECT_GT(simulate(policy, costs, 0, 2000, 2).rate() * costs(1), 0.95);
  }
}

TEST(DraftPolicy, StopsWhereDraftsDoNotPayAndTriesOneDraftAfterSixtyFourSteps) {
  DraftPolicy policy(rising(0.5), 7);
  EXPECT_FALSE(policy.refuses_next(Source::lookup));
  while (policy.choose(Source::lookup, 7) > 0) policy.learn(Source::lookup, 1, 0);
  for (int i = 0; i < 62; ++i) {
    EXPECT_TRUE(policy.refuses_next(Source::lookup)) << i;
    ASSERT_EQ(policy.choose(Source::lookup, 7), 0) << i;
  }
  EXPECT_FALSE(policy.refuses_next(Source::lookup)) << "a draft is tried next";
  EXPECT_FALSE(policy.refuses_next(Source::prediction));
  EXPECT_EQ(policy.choose(Source::lookup, 7), 3);
  policy.learn(Source::lookup, 1, 0);
  EXPECT_EQ(policy.choose(Source::lookup, 7), 0) << "the probe failed";
  EXPECT_GT(policy.choose(Source::prediction, 7), 0) << "another source is not affected";
}

TEST(DraftPolicy, DraftsAgainSoonAfterTheTextHasBecomePredictable) {
  const StepCosts costs = rising(0.3);
  DraftPolicy policy(costs, 15);
  simulate(policy, costs, 0, 1000, 3);
  const Speed later = simulate(policy, costs, 1, 1000, 4);
  EXPECT_GT(later.rate(), 0.75 * best_fixed(costs, 1));
}

TEST(DraftPolicy, TakesNoMoreThanIsAvailableAllowedOrPriced) {
  DraftPolicy policy(rising(0.001, 6), 15);
  EXPECT_EQ(policy.most(), 5);
  EXPECT_EQ(policy.choose(Source::lookup, 15), 5);
  EXPECT_EQ(policy.choose(Source::lookup, 2), 2);
  EXPECT_EQ(policy.choose(Source::lookup, 0), 0);
  DraftPolicy one(rising(0.001, 1), 15);
  EXPECT_EQ(one.choose(Source::lookup, 15), 0);
  EXPECT_NE(error_of([&] { policy.learn(Source::lookup, 3, 1); }).find("1 accepted of 3"), std::string::npos);
  EXPECT_NE(error_of([] { StepCosts({1, 0}); }).find("positive"), std::string::npos);
}

}  // namespace
}  // namespace ingot::draft
