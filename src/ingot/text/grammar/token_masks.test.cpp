#include "ingot/text/grammar/token_masks.h"

#include <gtest/gtest.h>

#include <chrono>

#include "ingot/core/rng.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/text/grammar/json_schema.h"

namespace ingot {
namespace {

// All single bytes, and tokens of one to eight bytes: some occur twice, some are not UTF-8.
std::vector<std::string> vocabulary_of(size_t n) {
  const std::string letters = "{}[]\":,0123456789 .-+eE\\nutrabclsf\n\xc3\xa9\xe6\x97\xa5";
  std::vector<std::string> tokens(n);
  for (size_t id = 0; id < n; ++id) {
    if (id < 256) {
      tokens[id] = std::string(1, char(id));
      continue;
    }
    const auto words = Rng(5, Purpose::test).block(id);
    for (uint32_t i = 0; i <= words[0] % 8; ++i)
      tokens[id] += letters[size_t((words[1] >> (3 * i)) + words[2] * (i + 1)) % letters.size()];
  }
  for (size_t id = 256; id < n; id += 97) tokens[id].clear();
  return tokens;
}
std::pair<Grammar, Grammar::Rule> grammar_of_object() {
  Grammar g;
  const Grammar::Rule json = any_json_object(g);
  const Grammar::Rule rule = g.rule(g.call(json, g.control(1, Grammar::kEnd)));
  return {std::move(g), rule};
}
bool is_set(const std::vector<uint32_t>& mask, size_t id) { return (mask[id / 32] >> (id % 32) & 1) != 0; }

TEST(token_masks, a_mask_allows_the_tokens_whose_bytes_the_grammar_accepts) {
  const auto tokens = vocabulary_of(3001);
  const auto tree = std::make_shared<const TokenTree>(tokens, std::vector<int32_t>{3000, 2999, -1});
  auto [g, rule] = grammar_of_object();
  TokenGrammar grammar(tree, g, rule);
  GrammarWalk walk(g, rule);
  int32_t state = grammar.start(), mine = walk.start();
  const std::string text = "{\"a\\u00e9\xc3\xa9\": [1.5e-7, {\"b\": null}],\n  \"c\": \"\xe6\x97\xa5\"}";
  int64_t ends = 0;
  for (size_t at = 0; at <= text.size(); ++at) {
    const auto mask = grammar.allowed(state);
    ASSERT_EQ(mask->size(), size_t(3001 + 31) / 32);
    for (size_t id = 0; id < tokens.size(); ++id) {
      int32_t after = mine;
      if (id >= 2999)
        after = walk.next(mine, Grammar::kFirstControl + (id == 2999 ? 1 : 0));
      else if (tokens[id].empty())
        after = GrammarWalk::kDead;
      else
        for (size_t i = 0; i < tokens[id].size() && after != GrammarWalk::kDead; ++i)
          after = walk.next(after, uint8_t(tokens[id][i]));
      ASSERT_EQ(is_set(*mask, id), after != GrammarWalk::kDead)
          << "'" << tokens[id] << "' after " << text.substr(0, at);
      ASSERT_EQ(grammar.next(state, int32_t(id)) != GrammarWalk::kDead, after != GrammarWalk::kDead);
      ends += id == 2999 && after != GrammarWalk::kDead;
    }
    if (at == text.size()) break;
    state = grammar.next(state, uint8_t(text[at]));
    mine = walk.next(mine, uint8_t(text[at]));
  }
  EXPECT_EQ(ends, 1);  // the control token, after the object alone
}

TEST(token_masks, a_vocabulary_without_a_token_for_the_required_text_is_an_error) {
  const auto tree = std::make_shared<const TokenTree>(std::vector<std::string>{"{", "x"}, std::vector<int32_t>{});
  auto [g, rule] = grammar_of_object();
  TokenGrammar grammar(tree, g, rule);
  EXPECT_TRUE(is_set(*grammar.allowed(0), 0));
  EXPECT_FALSE(is_set(*grammar.allowed(0), 1));
  EXPECT_EQ(grammar.next(0, 1), GrammarWalk::kDead);
  EXPECT_EQ(testing::error_of([&] { grammar.allowed(grammar.next(0, 0)); }),
            "numeric: found no token that may follow, expected the vocabulary to have one");
}

// The bound is loose: it tells milliseconds from seconds on a busy machine.
TEST(token_masks, a_mask_of_200000_tokens_takes_milliseconds) {
  const auto tree = std::make_shared<const TokenTree>(vocabulary_of(200000), std::vector<int32_t>{199999, 199998});
  auto [g, rule] = grammar_of_object();
  TokenGrammar grammar(tree, g, rule);
  int32_t state = grammar.start();
  double most = 0, sum = 0;
  const std::string text = "{\"a\": \"bc\", \"d\": [1, 2]";
  for (const char c : text) {
    state = grammar.next(state, uint8_t(c));
    const auto start = std::chrono::steady_clock::now();
    grammar.allowed(state);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    most = std::max(most, seconds), sum += seconds;
  }
  RecordProperty("slowest_mask_ms", std::to_string(most * 1e3));
  std::printf("slowest mask %.2f ms, mean of %d: %.2f ms\n", most * 1e3, int(text.size()),
              sum * 1e3 / double(text.size()));
  EXPECT_LT(most, 0.5);
}

}  // namespace
}  // namespace ingot
