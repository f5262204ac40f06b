#include "ingot/models/draft/lookup.h"

#include <gtest/gtest.h>

#include "ingot/testing/temporary_directory.h"

namespace ingot::draft {
namespace {

using Ids = std::vector<int32_t>;
using testing::error_of;

Ids range(int32_t begin, int32_t end) {
  Ids ids;
  for (int32_t i = begin; i < end; ++i) ids.push_back(i);
  return ids;
}
Ids joined(std::initializer_list<Ids> parts) {
  Ids all;
  for (const Ids& part : parts) all.insert(all.end(), part.begin(), part.end());
  return all;
}

TEST(LookupDrafter, DraftsTheTokensAfterTheLatestPlaceOfTheLongestMatch) {
  LookupDrafter drafter;
  drafter.append(joined({range(0, 4), {50}, range(0, 4), {60, 61, 62, 63, 64}, {9, 2, 3, 70}, range(0, 4)}));
  const Draft d = drafter.draft(15);
  EXPECT_EQ(d.tokens, (Ids{60, 61, 62, 63}));  // as many as the match has tokens, although 2, 3 stood later
  EXPECT_EQ(d.source, Source::lookup);
  EXPECT_EQ(drafter.draft(2).tokens, (Ids{60, 61}));
  EXPECT_TRUE(drafter.draft(0).tokens.empty());
}

TEST(LookupDrafter, DraftsNothingAfterAMatchOfTwoTokens) {
  LookupDrafter drafter;
  EXPECT_TRUE(drafter.draft(15).tokens.empty());
  drafter.append(Ids{1, 2, 3, 4, 9, 3, 4});
  EXPECT_TRUE(drafter.draft(15).tokens.empty());
  drafter.append(Ids{9});
  EXPECT_EQ(drafter.draft(15).tokens, (Ids{3, 4, 9}));
}

TEST(LookupDrafter, ALongMatchIsAnotherSourceAndDraftsFifteenTokens) {
  LookupDrafter drafter;
  drafter.append(joined({range(0, 100), range(20, 60)}));
  const Draft d = drafter.draft(100);
  EXPECT_EQ(d.source, Source::long_lookup);
  EXPECT_EQ(d.tokens, range(60, 75));
}

TEST(LookupDrafter, ACopyContinuesAPeriodBeyondTheEndOfTheText) {
  LookupDrafter drafter;
  drafter.append(Ids{7, 1, 2, 1, 2, 1, 2});
  EXPECT_EQ(drafter.draft(4).tokens, (Ids{1, 2, 1, 2}));
}

TEST(LookupDrafter, AfterTruncationDraftsAsIfTheTokensHadNeverBeen) {
  const Ids text = joined({range(0, 10), {42}, range(0, 6), {43, 44}, range(0, 5)});
  for (int64_t kept = 0; kept <= int64_t(text.size()); ++kept) {
    LookupDrafter cut(range(2, 9)), fresh(range(2, 9));
    cut.append(text);
    cut.truncate(kept);
    fresh.append(std::span(text).first(size_t(kept)));
    EXPECT_EQ(cut.length(), kept);
    for (LookupDrafter* d : {&cut, &fresh}) d->append(Ids{3, 4, 5});
    EXPECT_EQ(cut.draft(9).tokens, fresh.draft(9).tokens);
    EXPECT_EQ(cut.draft(9).source, fresh.draft(9).source);
  }
  // The end of the text is in the prediction, which the text's beginning would continue.
  LookupDrafter followed(range(2, 9));
  followed.append(Ids{5, 6, 30, 2, 3, 4});
  EXPECT_EQ(followed.draft(9).tokens, range(5, 9));
  followed.truncate(2);
  EXPECT_TRUE(followed.draft(9).tokens.empty());
  LookupDrafter drafter;
  EXPECT_NE(error_of([&] { drafter.truncate(1); }).find("found a length of 1"), std::string::npos);
}

TEST(LookupDrafter, FollowsThePredictionUntilATokenDiffersAndFindsThePlaceAgain) {
  LookupDrafter drafter(range(100, 140));
  drafter.append(Ids{1, 2, 3});
  EXPECT_TRUE(drafter.draft(15).tokens.empty());
  drafter.append(Ids{100, 101});
  EXPECT_TRUE(drafter.draft(15).tokens.empty()) << "two tokens may be chance";
  drafter.append(Ids{102});
  EXPECT_EQ(drafter.draft(4).tokens, range(103, 107));
  EXPECT_EQ(drafter.draft(4).source, Source::prediction);
  drafter.append(Ids{103, 104, 7});  // 105 was predicted
  EXPECT_TRUE(drafter.draft(15).tokens.empty());
  drafter.append(Ids{106, 107, 108});
  EXPECT_EQ(drafter.draft(2).tokens, range(109, 111));
  drafter.append(range(109, 140));
  EXPECT_TRUE(drafter.draft(15).tokens.empty()) << "the prediction has ended";
}

TEST(LookupDrafter, ALongerMatchInTheSlotWinsOverThePrediction) {
  LookupDrafter drafter(joined({range(10, 14), {90}}));
  drafter.append(joined({range(5, 14), {50, 51}, range(5, 14)}));
  EXPECT_EQ(drafter.draft(1).tokens, (Ids{50}));
  LookupDrafter equal(joined({range(5, 14), {90}}));
  equal.append(joined({range(5, 14), {50, 51}, range(5, 14)}));
  EXPECT_EQ(equal.draft(1).tokens, (Ids{90})) << "of equal matches the prediction's comes first";
}

}  // namespace
}  // namespace ingot::draft
