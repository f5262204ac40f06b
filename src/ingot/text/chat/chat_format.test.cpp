#include "ingot/text/chat/chat_format.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "ingot/text/chat/harmony_bytes.test.h"
#include "ingot/text/chat/turns.h"

namespace ingot {
namespace {

// A format with the given efforts; its other functions are not called.
class Efforts final : public ChatFormat {
 public:
  explicit Efforts(std::vector<std::string> efforts) : efforts_(std::move(efforts)) {}
  const char* name() const override { return "efforts"; }
  std::vector<std::string> efforts() const override { return efforts_; }
  std::vector<int32_t> prompt(const ChatConversation&) const override { return {}; }
  std::vector<int32_t> stop_ids() const override { return {}; }
  bool is_control(int32_t) const override { return false; }
  std::unique_ptr<ChatParser> parser(std::vector<std::string>) const override { return nullptr; }
  Grammar::Rule answer_rule(Grammar&, const ChatAnswerForm&) const override { return 0; }
  std::vector<int32_t> grammar_controls() const override { return {}; }

 private:
  std::vector<std::string> efforts_;
};

// The right sides are the output of Python's json.dumps.
TEST(chat_format, numbers_of_a_call_are_those_of_python) {
  for (const auto& [json, python] :
       std::vector<std::pair<std::string, std::string>>{{"1e15", "1000000000000000.0"},
                                                        {"-1234567890123456.7", "-1234567890123456.8"},
                                                        {"9.999999999999998e15", "9999999999999998.0"},
                                                        {"1e16", "1e+16"},
                                                        {"123456789012345.0", "123456789012345.0"},
                                                        {"0.0001", "0.0001"},
                                                        {"0.00001", "1e-05"},
                                                        {"1.5E-7", "1.5e-07"},
                                                        {"1e300", "1e+300"},
                                                        {"5e-324", "5e-324"},
                                                        {"1.0", "1.0"},
                                                        {"-0.0", "-0.0"},
                                                        {"100", "100"},
                                                        {"0.1", "0.1"},
                                                        {"9007199254740993", "9007199254740993"}}) {
    EXPECT_EQ(python_json(json), python);
    EXPECT_EQ(python_json("{\"x\":[" + json + "]}"), "{\"x\": [" + python + "]}");
  }
}

TEST(chat_format, the_nearest_effort_of_a_format_is_taken) {
  const HarmonyFormat& harmony = testing::harmony_format();
  for (const auto& [asked, taken] : std::vector<std::pair<std::string, std::string>>{{"", ""},
                                                                                     {"none", "low"},
                                                                                     {"minimal", "low"},
                                                                                     {"medium", "medium"},
                                                                                     {"high", "high"},
                                                                                     {"xhigh", "high"},
                                                                                     {"max", "high"}})
    EXPECT_EQ(nearest_effort(harmony, asked), taken) << asked;
  EXPECT_EQ(nearest_effort(Efforts({}), "high"), "");
  const Efforts on_or_off({"none", "high"});
  EXPECT_EQ(nearest_effort(on_or_off, "minimal"), "none");
  EXPECT_EQ(nearest_effort(on_or_off, "low"), "none");  // equally near to both
  EXPECT_EQ(nearest_effort(on_or_off, "medium"), "high");
}

TEST(chat_format, text_before_a_call_of_the_same_turn_does_not_end_the_turn) {
  ChatConversation c{.messages = {{.role = ChatRole::user, .content = "a"},
                                  {.role = ChatRole::assistant, .thoughts = "hm"},
                                  {.role = ChatRole::assistant, .content = "Let me see."},
                                  {.role = ChatRole::assistant, .calls = {{.name = "f", .arguments = "{}"}}},
                                  {.role = ChatRole::result, .content = "3", .function = "f"},
                                  {.role = ChatRole::assistant, .content = "It is 3."}}};
  const std::vector<HarmonyMessage> m = harmony_messages(c);
  ASSERT_EQ(m.size(), 7u);
  EXPECT_EQ(m[2].channel, "analysis");
  EXPECT_EQ(m[3].channel, "commentary");
  EXPECT_EQ(m[4].recipient, "functions.f");
  EXPECT_EQ(m[6].channel, "final");
  // The turn with the call has not ended, and keeps its thoughts in the prompt.
  c.messages.pop_back();
  const std::string prompt = testing::harmony_bytes()->decode(testing::harmony_format().prompt(c));
  EXPECT_NE(prompt.find("analysishm"), std::string::npos) << prompt;
}

TEST(chat_format, the_next_prompt_shows_the_parts_of_an_answer_as_they_were_written) {
  const auto tokenizer = testing::harmony_bytes();
  const HarmonyFormat& format = testing::harmony_format();
  const HarmonyTokens& t = format.tokens();
  std::vector<int32_t> ids;
  const auto write = [&](std::initializer_list<int32_t> controls, const std::string& text) {
    ids.insert(ids.end(), controls);
    for (const int32_t id : tokenizer->encode(text)) ids.push_back(id);
  };
  write({t.channel}, "analysis");
  write({t.message}, "hm");
  write({t.end, t.start}, "assistant");
  write({t.channel}, "commentary");
  write({t.message}, "I look.");
  write({t.end, t.start}, "assistant");
  write({t.channel}, "final");
  write({t.message}, "caf\u00e9");
  const auto parser = format.parser();
  std::vector<ChatPart> parts;
  std::string kinds;  // the kind of each id
  const auto add = [&](const std::vector<ChatDelta>& deltas) {
    for (const ChatDelta& d : deltas)
      if (d.begins)
        parts.push_back(d.added);
      else
        parts.at(d.part).content += d.added.content;
  };
  for (const int32_t id : ids) {
    add(parser->push(id));
    kinds += parser->kind_of_last() ? name_of(*parser->kind_of_last())[1] : '-';
  }
  add(parser->push(t.answer_end));
  add(parser->finish());
  EXPECT_FALSE(parser->ended());
  EXPECT_EQ(parts, (std::vector<ChatPart>{{ChatKind::thought, "analysis", "", "hm"},
                                          {ChatKind::text, "commentary", "", "I look."},
                                          {ChatKind::text, "final", "", "caf\u00e9"}}));
  EXPECT_EQ(std::count(kinds.begin(), kinds.end(), 'h'), 2);
  EXPECT_EQ(std::count(kinds.begin(), kinds.end(), 'e'), 7 + 5);
  ChatConversation c{.messages = messages_of(parts)};
  const std::vector<HarmonyMessage> m = harmony_messages(c);
  ASSERT_EQ(m.size(), 4u);
  EXPECT_EQ(m[2].channel, "commentary");
  EXPECT_EQ(m[3].channel, "final");
}

}  // namespace
}  // namespace ingot
