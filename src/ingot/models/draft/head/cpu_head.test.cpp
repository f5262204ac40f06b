#include "ingot/models/draft/head/cpu_head.h"

#include <gtest/gtest.h>

#include "ingot/models/draft/head/random_head.test.h"
#include "ingot/models/gpt_oss/random_model.test.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot::draft {
namespace {

using testing::DefinedHead;
using testing::HeadCase;
using testing::RandomHead;
using Ids = std::vector<int32_t>;
using Row = std::vector<double>;

// The target gives the head its embedding; the tests make its hidden states up.
const testing::RandomGptOss& target() {
  static const testing::RandomGptOss t;
  return t;
}

struct Opened {
  testing::TemporaryDirectory dir;
  DraftHead head;
  Opened(RandomHead random, const HeadOptions& options = {}) {
    random.write(dir / "head");
    head = load_draft_head(dir / "head", target().config, target().config.layers, options);
  }
};

constexpr int64_t kTokens = 40, kBatch = 8;

// Tokens of a sequence and the target's hidden states, with a residual stream that grows as those of models do.
struct Text {
  Ids ids = Ids(size_t(kTokens));
  std::vector<float> states;
  int64_t width;
  explicit Text(const HeadConfig& c, uint64_t seed = 1) : states(size_t(kTokens * c.features())), width(c.features()) {
    testing::fill_ids(Tensor(ids.data(), {kTokens}), seed, c.vocab);
    testing::fill_normal(Tensor(states.data(), {kTokens, width}), seed, 3);
  }
  void append(int64_t begin, int64_t end, CpuHead& head, HeadCache& cache) const {
    const float* from = states.data() + begin * width;
    std::copy(from, from + (end - begin) * width, head.hidden_states().ptr<float>());
    head.append(std::span(ids).subspan(size_t(begin), size_t(end - begin)), cache);
  }
  std::vector<Row> rows(int64_t n) const {
    std::vector<Row> out;
    for (int64_t t = 0; t < n; ++t) out.emplace_back(states.begin() + t * width, states.begin() + (t + 1) * width);
    return out;
  }
};

TEST(CpuHead, GuessesAreThoseOfTheDefinitionForEveryKindOfHead) {
  for (const HeadCase& c : testing::head_cases()) {
    SCOPED_TRACE(c.name);
    const Opened o(c.head, c.options);
    CpuHead head(o.head, target().weights, kBatch, kTokens + 8);
    const DefinedHead defined(o.head, target().weights);
    const Text text(o.head.config);
    for (const int64_t n : {1, 2, 9, 30}) {
      HeadCache cache(o.head.config, kTokens + 8);
      for (int64_t t = 0; t < n; t += kBatch) text.append(t, std::min(n, t + kBatch), head, cache);
      const Ids tokens(text.ids.begin(), text.ids.begin() + n + 1);
      const DefinedHead::Guesses want = defined.draft(text.rows(n), tokens, 4);
      for (int64_t count = 1; count <= 4; ++count) {
        SCOPED_TRACE(detail::concat(n, " tokens, guess ", count));
        const Ids found = head.draft(cache, tokens.back(), count);
        EXPECT_EQ(found, Ids(want.ids.begin(), want.ids.begin() + count));
        // A guess takes some ten steps of sums of up to 96 products in fp32, and begins with the result of the guess
        // before.
        const Row &expected = want.logits[size_t(count - 1)], logits = testing::values(head.last_logits());
        double largest = 0;
        for (const double x : expected) largest = std::max(largest, std::abs(x));
        for (size_t i = 0; i < expected.size(); ++i)
          EXPECT_NEAR(logits[i], expected[i], largest * double(count) * 64 * 0x1p-24) << "id " << i;
      }
    }
  }
}

TEST(CpuHead, ACacheAfterDraftsAndTruncationsIsThatOfItsTokensAlone) {
  for (const HeadCase& c : testing::head_cases()) {
    SCOPED_TRACE(c.name);
    const Opened o(c.head, c.options);
    CpuHead head(o.head, target().weights, kBatch, kTokens + 8);
    const Text text(o.head.config), other(o.head.config, 2);
    HeadCache cache(o.head.config, kTokens + 8), copied(o.head.config, kTokens + 8);
    const auto expect_fresh = [&](HeadCache& used) {
      const int64_t n = used.length();
      HeadCache fresh(o.head.config, kTokens + 8);
      for (int64_t t = 0; t < n; t += kBatch) text.append(t, std::min(n, t + kBatch), head, fresh);
      const Ids want = head.draft(fresh, text.ids[size_t(n)], 5);
      const Row logits = testing::values(head.last_logits());
      EXPECT_EQ(head.draft(used, text.ids[size_t(n)], 5), want) << n << " tokens";
      EXPECT_EQ(testing::values(head.last_logits()), logits) << n << " tokens";
    };
    text.append(0, 6, head, cache);
    expect_fresh(cache);
    text.append(6, 7, head, cache), expect_fresh(cache);
    // A step computes a draft, of which two tokens are accepted.
    text.append(7, 10, head, cache), other.append(10, 14, head, cache);
    cache.truncate(10), expect_fresh(cache);
    // After a draft behind another token, the cache again has the same length.
    head.draft(cache, (text.ids[10] + 1) % 37, 3);
    expect_fresh(cache);
    head.draft(cache, (text.ids[10] + 1) % 37, 3);
    text.append(10, 12, head, cache), expect_fresh(cache);
    for (const int64_t length : {12, 11, 5, 4, 1}) cache.truncate(length), expect_fresh(cache);
    cache.truncate(0);
    other.append(0, 8, head, cache), head.draft(cache, 3, 2);
    cache.truncate(0);
    text.append(0, 8, head, cache), text.append(8, 16, head, cache), head.compute_rows(cache);
    for (const int64_t length : {16, 15, 7, 1}) copied.copy_from(cache, length), expect_fresh(copied);
    expect_fresh(cache);
  }
}

TEST(CpuHead, RefusesMoreTokensThanItHasRoomFor) {
  const Opened o(RandomHead{});
  CpuHead head(o.head, target().weights, kBatch, 12);
  const Text text(o.head.config);
  HeadCache cache(o.head.config, 12);
  EXPECT_NE(testing::error_of([&] { head.draft(cache, 1, 1); }).find("at least 1"), std::string::npos);
  text.append(0, 8, head, cache);
  EXPECT_NE(testing::error_of([&] { head.append(std::span(text.ids).first(5), cache); }).find("behind 8"),
            std::string::npos);
  EXPECT_NE(testing::error_of([&] { head.draft(cache, 1, 5); }).find("a draft of 5 tokens"), std::string::npos);
  EXPECT_EQ(head.draft(cache, 1, 4).size(), 4u);
  EXPECT_NE(testing::error_of([&] { cache.truncate(9); }).find("found a length of 9"), std::string::npos);
}

}  // namespace
}  // namespace ingot::draft
