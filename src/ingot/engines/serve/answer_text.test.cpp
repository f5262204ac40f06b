#include "ingot/engines/serve/answer_text.h"

#include <gtest/gtest.h>

#include "ingot/core/rng.h"
#include "ingot/text/byte_tokenizer.test.h"
#include "ingot/text/chat/harmony_bytes.test.h"

namespace ingot {
namespace {

// The definition, character by character: as soon as the text ends with a stop string, the text is cut before the
// longest such stop string.
std::string cut(const std::string& text, const std::vector<std::string>& stops) {
  for (size_t n = 1; n <= text.size(); ++n) {
    size_t longest = 0;
    for (const std::string& s : stops)
      if (text.substr(0, n).ends_with(s)) longest = std::max(longest, s.size());
    if (longest > 0) return text.substr(0, n - longest);
  }
  return text;
}

TEST(stop_strings, text_in_any_pieces_is_cut_where_the_whole_text_would_be) {
  const std::vector<std::vector<std::string>> lists = {
      {}, {"a"}, {"ab"}, {"aab"}, {"aba", "bb"}, {"abab", "ba"}, {"bbbb"}, {"ab", "aab"}, {"bab", "b"}};
  int found = 0;
  for (uint32_t seed = 0; seed < 2000; ++seed) {
    const Rng rng(seed, Purpose::test);
    std::string text, out;
    for (uint64_t i = 0; i < rng.bits(0) % 12; ++i) text += rng.bits(i + 1) % 3 == 0 ? 'b' : 'a';
    const auto& stops = lists[seed % lists.size()];
    StopStrings s(stops);
    for (size_t at = 0; at < text.size() && !s.found();) {
      const size_t n = 1 + rng.bits(100 + at) % 3;
      const std::string piece = s.push(std::string_view(text).substr(at, n));
      out += piece;
      EXPECT_TRUE(text.starts_with(out));
      at += n;
    }
    out += s.finish();
    EXPECT_EQ(out, cut(text, stops)) << text;
    found += s.found();
  }
  EXPECT_GT(found, 500);
}

struct Answer {
  AnswerPiece all;
  std::vector<size_t> sizes;
};
Vocabulary bytes() { return {.tokenizer = std::make_shared<testing::ByteTokenizer>()}; }

AnswerPiece read(AnswerText& a, const std::string& text, bool logprobs = false) {
  AnswerPiece all;
  const auto add = [&](const AnswerPiece& p) {
    all.text += p.text;
    all.tokens.insert(all.tokens.end(), p.tokens.begin(), p.tokens.end());
  };
  for (const char c : text) {
    const TokenLogprobs l{.sampled = -1};
    if (!a.ended()) add(a.push(int32_t(uint8_t(c)), logprobs ? &l : nullptr));
  }
  add(a.finish(-1));
  return all;
}

TEST(answer_text, characters_are_whole_and_incomplete_ones_are_replaced) {
  const Vocabulary v = bytes();
  AnswerText a(v, {});
  EXPECT_TRUE(a.push(0xe6, nullptr).empty());
  EXPECT_TRUE(a.push(0x97, nullptr).empty());
  EXPECT_EQ(a.push(0xa5, nullptr).text, "\u65e5");
  EXPECT_TRUE(a.push(0xe6, nullptr).empty());
  EXPECT_EQ(a.finish(-1).text, "\ufffd");
}

TEST(answer_text, a_stop_string_ends_the_text_and_its_logprobs) {
  const Vocabulary v = bytes();
  AnswerText a(v, {.stop = {"END"}});
  const AnswerPiece p = read(a, "An EN, the END of it", true);
  EXPECT_EQ(p.text, "An EN, the ");
  EXPECT_EQ(p.tokens.size(), p.text.size());
  EXPECT_TRUE(a.ended());
  AnswerText half(v, {.stop = {"END"}});
  EXPECT_EQ(read(half, "the EN", true).text, "the EN");
  AnswerText again(v, {.stop = {"END"}});
  EXPECT_EQ(read(again, "the EN", true).tokens.size(), 6u);
}

// Harmony's control tokens above the bytes.
struct Harmony {
  std::shared_ptr<const ByteBpe> bpe = testing::harmony_bytes();
  Vocabulary vocabulary{.tokenizer = bpe, .bpe = bpe.get(), .chat = std::make_shared<HarmonyFormat>(bpe, "test")};
  // "[channel]" and the like are control tokens here.
  std::vector<int32_t> ids(const std::string& text) const {
    std::vector<int32_t> out;
    for (size_t at = 0; at < text.size(); ++at) {
      const size_t end = text[at] == '[' ? text.find(']', at) : std::string::npos;
      if (end == std::string::npos) {
        out.push_back(int32_t(uint8_t(text[at])));
        continue;
      }
      const std::string name = "<|" + text.substr(at + 1, end - at - 1) + "|>";
      for (int32_t i = 0; i < 9; ++i)
        if (name == testing::kHarmonyNames[i]) out.push_back(256 + i);
      at = end;
    }
    return out;
  }
  struct Read {
    std::string text, reasoning, tokens;
    std::vector<std::pair<std::string, std::string>> calls;
    bool called, ended;
  };
  Read read(const std::string& said, AnswerText::Options o = {}, int32_t stop_id = -1) const {
    o.chat = true;
    AnswerText a(vocabulary, o);
    Read r;
    const auto add = [&](const AnswerPiece& p) {
      r.text += p.text;
      r.reasoning += p.reasoning;
      for (const TokenInfo& t : p.tokens) r.tokens += bpe->token_bytes(t.id);
      for (const CallPiece& c : p.calls) {
        if (c.index >= r.calls.size()) r.calls.resize(c.index + 1);
        r.calls[c.index].first += c.name;
        r.calls[c.index].second += c.arguments;
      }
    };
    const TokenLogprobs l{};
    for (const int32_t id : ids(said)) add(a.push(id, &l));
    add(a.finish(stop_id));
    r.called = a.called(), r.ended = a.ended();
    return r;
  }
};

TEST(answer_text, thoughts_and_text_are_apart_and_logprobs_are_of_the_text) {
  const Harmony h;
  const auto r = h.read("[channel]analysis[message]Hm.[end][start]assistant[channel]final[message]Yes.", {}, 258);
  EXPECT_EQ(r.reasoning, "Hm.");
  EXPECT_EQ(r.text, "Yes.");
  EXPECT_EQ(r.tokens, "Yes.");
  EXPECT_FALSE(r.called);
}

TEST(answer_text, a_stop_string_counts_in_the_text_and_not_in_thoughts) {
  const Harmony h;
  const auto r = h.read("[channel]analysis[message]a STOP b[end][start]assistant[channel]final[message]c STOP d",
                        {.stop = {"STOP"}});
  EXPECT_EQ(r.reasoning, "a STOP b");
  EXPECT_EQ(r.text, "c ");
  EXPECT_TRUE(r.ended);
}

TEST(answer_text, calls_of_undeclared_functions_are_calls_too) {
  const Harmony h;
  const std::string said =
      "[channel]commentary to=functions.f [constrain]json[message]{\"a\": 1}[call][start]assistant "
      "to=functions.f[channel]commentary"
      "[message][call][start]assistant to=functions.g[channel]commentary[message]no";
  const auto r = h.read(said, {.functions = {"f"}});
  using Calls = std::vector<std::pair<std::string, std::string>>;
  EXPECT_EQ(r.calls, (Calls{{"f", "{\"a\": 1}"}, {"f", ""}, {"g", "no"}}));
  EXPECT_EQ(r.reasoning, "");
  EXPECT_EQ(r.text, "");
  EXPECT_TRUE(r.called);
  EXPECT_EQ(h.read(said).calls, r.calls);  // nothing is declared
}

TEST(answer_text, a_second_call_ends_an_answer_that_may_have_one) {
  const Harmony h;
  const std::string call = "[channel]commentary to=functions.f[message]{\"a\": 1}[end]", again = "[start]assistant",
                    text = "[start]assistant[channel]final[message]Yes.[end]";
  using Calls = std::vector<std::pair<std::string, std::string>>;
  const Calls one = {{"f", "{\"a\": 1}"}};
  const auto both = h.read(call + again + call), first = h.read(call + again + call, {.one_call = true}),
             last = h.read(text.substr(16) + again + call + again + call + text, {.one_call = true});
  EXPECT_EQ(both.calls, (Calls{one[0], one[0]}));
  EXPECT_FALSE(both.ended);
  EXPECT_EQ(first.calls, one);
  EXPECT_TRUE(first.ended && first.called);
  EXPECT_EQ(last.calls, one);
  EXPECT_EQ(last.text, "Yes.");
  EXPECT_TRUE(last.called);
  const auto alone = h.read(call + text, {.one_call = true});
  EXPECT_EQ(alone.calls, one);
  EXPECT_EQ(alone.text, "Yes.");
  EXPECT_FALSE(alone.ended);
}

TEST(answer_text, places_of_tokens_are_counted_in_bytes_and_in_whole_characters) {
  const Vocabulary v = bytes();
  AnswerText a(v, {});
  std::vector<int64_t> offsets, characters;
  for (const TokenInfo& t : read(a, "\u65e5x\u00e9y", true).tokens)
    offsets.push_back(t.offset), characters.push_back(t.characters);
  EXPECT_EQ(offsets, (std::vector<int64_t>{0, 0, 0, 3, 4, 4, 6}));
  EXPECT_EQ(characters, (std::vector<int64_t>{0, 0, 0, 1, 2, 2, 3}));
}

TEST(answer_text, a_stop_id_that_is_text_is_no_part_of_the_answer_and_completes_no_call) {
  const Harmony h;
  const std::string final = "[channel]final[message]", call = "[channel]commentary to=functions.f[message]";
  EXPECT_EQ(h.read(final + "one", {}, 't').text, "one");
  EXPECT_EQ(h.read("[channel]analysis[message]Hm", {}, '.').reasoning, "Hm");
  const auto cut = h.read(call + "{\"a\": 1", {}, '}');
  ASSERT_EQ(cut.calls.size(), 1u);
  EXPECT_EQ(cut.calls[0].second, "{\"a\": 1");
  EXPECT_FALSE(cut.called);
  const int32_t end_of_call = h.ids("[call]")[0];
  EXPECT_TRUE(h.read(call + "{\"a\": 1}", {}, end_of_call).called);
  EXPECT_TRUE(h.read(call + "{\"a\": 1}").called);
}

TEST(answer_text, a_call_may_omit_the_namespace_and_gets_a_name_that_the_api_accepts) {
  const Harmony h;
  const auto called = [&](const std::string& recipient) {
    const auto r = h.read("[channel]commentary to=" + recipient + " [constrain]json[message]{}[call]",
                          {.functions = {"get_weather", "assistant"}});
    EXPECT_EQ(r.calls.size(), 1u) << recipient;
    return r.calls.empty() ? "" : r.calls[0].first;
  };
  EXPECT_EQ(called("get_weather"), "get_weather");
  EXPECT_EQ(called("functions.get_weather"), "get_weather");
  EXPECT_EQ(called("assistant"), "assistant");  // a function of that name is declared
  EXPECT_EQ(called("python"), "python");
  EXPECT_EQ(called("browser.search"), "browser_search");
  EXPECT_EQ(called("functions."), "functions_");
  EXPECT_EQ(called("functions." + std::string(200, 'x')), std::string(128, 'x'));
  const auto text = h.read("[channel]commentary to=user[message]Let me look.[end]");
  EXPECT_EQ(text.text, "Let me look.");
  EXPECT_FALSE(text.called);
}

TEST(answer_text, tokens_of_thoughts_are_counted) {
  const Harmony h;
  AnswerText a(h.vocabulary, {.chat = true});
  for (const int32_t id : h.ids("[channel]analysis[message]four[end][start]assistant[channel]final[message]Yes."))
    a.push(id, nullptr);
  EXPECT_EQ(a.thought_tokens(), 4);
}

TEST(answer_text, any_ids_are_accepted_and_no_control_token_is_shown) {
  const Harmony h;
  for (uint32_t seed = 0; seed < 500; ++seed) {
    const Rng rng(seed, Purpose::test);
    std::string said;
    for (uint64_t i = 0; i < 40; ++i) {
      const uint32_t k = rng.bits(i) % 14;
      const char* const words[] = {"final", "analysis", "user", " to=functions.f", "x"};
      said += k < 9 ? "[" +
                          std::string(testing::kHarmonyNames[k])
                              .substr(2, std::string(testing::kHarmonyNames[k]).size() - 4) +
                          "]"
                    : words[k - 9];
    }
    const auto r = h.read(said, {.functions = {"f"}});
    for (const std::string& text : {r.text, r.reasoning}) EXPECT_EQ(text.find("<|"), std::string::npos) << said;
  }
}

}  // namespace
}  // namespace ingot
