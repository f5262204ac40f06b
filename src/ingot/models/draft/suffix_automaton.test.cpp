#include "ingot/models/draft/suffix_automaton.h"

#include <gtest/gtest.h>

#include <random>

namespace ingot::draft {
namespace {

using Ids = std::vector<int32_t>;

int64_t common_suffix(const Ids& a, int64_t a_end, const Ids& b, int64_t b_end) {
  int64_t n = 0;
  while (n < a_end && n < b_end && a[size_t(a_end - 1 - n)] == b[size_t(b_end - 1 - n)]) ++n;
  return n;
}
// The longest suffix of the first `size` tokens of `text` that ends before `end` of `in`, latest place first.
SuffixAutomaton::Match longest(const Ids& text, int64_t size, const Ids& in, int64_t before) {
  SuffixAutomaton::Match best;
  for (int64_t end = before; end >= 1; --end)
    if (const int64_t n = common_suffix(text, size, in, end); n > best.length) best = {n, end};
  return best;
}
Ids random_text(size_t size, int32_t ids, unsigned seed) {
  std::mt19937 random(seed);
  Ids text;
  for (size_t i = 0; i < size; ++i) text.push_back(int32_t(random() % unsigned(ids)));
  return text;
}
// Parts of the text are repeated, as in an edit of a file.
Ids text_with_copies(size_t size, unsigned seed) {
  std::mt19937 random(seed);
  Ids text = random_text(30, 200000, seed);
  while (text.size() < size) {
    const size_t begin = random() % text.size(), count = std::min<size_t>(1 + random() % 40, text.size() - begin);
    const Ids piece(text.begin() + int64_t(begin), text.begin() + int64_t(begin + count));
    text.insert(text.end(), piece.begin(), piece.end());
    if (random() % 2) text.push_back(int32_t(random() % 200000));
  }
  return text;
}

TEST(SuffixAutomaton, FindsTheLongestRepeatedSuffixAtItsLatestPlaceAsASearchDoes) {
  std::vector<Ids> texts = {random_text(300, 2, 1), random_text(400, 3, 2), random_text(500, 8, 3),
                            text_with_copies(600, 4), text_with_copies(600, 5)};
  for (const Ids& text : texts) {
    SuffixAutomaton automaton;
    for (size_t i = 0; i < text.size(); ++i) {
      automaton.append(text[i]);
      const auto expected = longest(text, int64_t(i) + 1, text, int64_t(i));
      ASSERT_EQ(automaton.match().length, expected.length) << i;
      if (expected.length > 0) { ASSERT_EQ(automaton.match().end, expected.end) << i; }
    }
    EXPECT_EQ(automaton.size(), int64_t(text.size()));
  }
}

TEST(SuffixAutomaton, FollowsASecondTextByTheLongestSuffixThatTheFirstContains) {
  const Ids text = text_with_copies(300, 6), other = text_with_copies(300, 6);
  Ids second = random_text(50, 200000, 7);
  second.insert(second.end(), other.begin() + 20, other.begin() + 200);
  second.insert(second.begin() + 100, 5);
  for (const auto& [first, follower] : {std::pair(text, second), {random_text(200, 3, 8), random_text(300, 3, 9)}}) {
    SuffixAutomaton automaton;
    for (const int32_t id : first) automaton.append(id);
    SuffixAutomaton::Cursor cursor;
    for (size_t i = 0; i < follower.size(); ++i) {
      cursor = automaton.advance(cursor, follower[i]);
      const auto expected = longest(follower, int64_t(i) + 1, first, int64_t(first.size()));
      ASSERT_EQ(cursor.length, expected.length) << i;
      if (expected.length > 0) { ASSERT_EQ(automaton.end(cursor), expected.end) << i; }
    }
  }
}

TEST(SuffixAutomaton, APeriodicTextOfManyTokensTakesLinearTimeAndItsPlacesAreRight) {
  SuffixAutomaton automaton;
  for (int32_t i = 0; i < 200000; ++i) {
    automaton.append(i % 3);
    if (i < 3) continue;
    ASSERT_EQ(automaton.match().length, i - 2);
    ASSERT_EQ(automaton.match().end, i - 2);
  }
}

TEST(SuffixAutomaton, IsEmptyAfterClear) {
  SuffixAutomaton automaton;
  for (const int32_t id : {1, 2, 1, 2}) automaton.append(id);
  EXPECT_EQ(automaton.match().length, 2);
  automaton.clear();
  EXPECT_EQ(automaton.size(), 0);
  EXPECT_EQ(automaton.match().length, 0);
  automaton.append(1);
  EXPECT_EQ(automaton.match().length, 0);
}

}  // namespace
}  // namespace ingot::draft
