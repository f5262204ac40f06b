#include "ingot/text/chat/harmony.h"

#include <gtest/gtest.h>

#include <map>
#include <sstream>

#include "ingot/core/rng.h"
#include "ingot/io/file.h"
#include "ingot/io/utf8.h"
#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

using Role = HarmonyRole;
using testing::error_of;

bool valid(const std::string& text) { return find_invalid_utf8(text) < 0; }

const std::vector<std::string> kControls = {"<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>",
                                            "<|reserved|>",    "<|channel|>",   "<|start|>",  "<|end|>",
                                            "<|message|>",     "<|call|>"};

// A vocabulary of the format, learned from a few words.
struct Vocabulary {
  ByteBpe bpe;
  HarmonyTokens tokens;
  static ByteBpe learn(const std::vector<std::string>& specials) {
    const std::vector<std::string_view> documents = {"assistant analysis final commentary to=functions.f json user",
                                                     "assistant analysis final commentary What is 2 + 2? 4"};
    return train_bpe(documents, int(256 + specials.size() + 30),
                     {.pattern = WordPattern::o200k, .special_tokens = specials});
  }
  Vocabulary() : bpe(learn(kControls)), tokens(bpe, "test") {}
  // Encodes text in which control tokens are spelled out.
  std::vector<int32_t> ids(const std::string& text) const {
    std::vector<int32_t> out;
    for (size_t at = 0; at < text.size();) {
      bool control = false;
      for (const SpecialToken& s : bpe.rules().specials)
        if (text.compare(at, s.text.size(), s.text) == 0) {
          out.push_back(s.id);
          at += s.text.size();
          control = true;
        }
      if (control) continue;
      const size_t end = std::min(text.find("<|", at + 1), text.size());
      const auto part = bpe.encode(text.substr(at, end - at));
      out.insert(out.end(), part.begin(), part.end());
      at = end;
    }
    return out;
  }
  std::vector<HarmonyMessage> parse(const std::string& text, bool answering = true) const {
    HarmonyParser parser(bpe, tokens, answering);
    for (const int32_t id : ids(text)) parser.push(id);
    parser.finish();
    return parser.messages();
  }
};
const Vocabulary& vocabulary() {
  static const Vocabulary v;
  return v;
}

// --- rendering -----------------------------------------------------------------------------------------------------
HarmonyMessage system(const HarmonySystem& s) { return {.role = Role::system, .content = harmony_system_text(s)}; }
HarmonyMessage developer(const std::string& instructions, const std::vector<HarmonyFunction>& functions = {}) {
  return {.role = Role::developer, .content = harmony_developer_text(instructions, functions)};
}
HarmonyMessage user(const std::string& text) { return {.role = Role::user, .content = text}; }
HarmonyMessage says(const std::string& channel, const std::string& text) {
  return {.role = Role::assistant, .channel = channel, .content = text};
}

const std::vector<HarmonyFunction> kFunctions = {
    {"get_location", "Gets the location of the user.", ""},
    {"get_current_weather", "Gets the current weather in the provided location.",
     R"({"type": "object", "properties": {"location": {"type": "string", "description": "The city and state, e.g. San Francisco, CA"},
         "format": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"}}, "required": ["location"]})"},
    {"get_multiple_weathers", "Gets the current weather in the provided list of locations.",
     R"({"type": "object", "properties": {"locations": {"type": "array", "items": {"type": "string"},
         "description": "List of city and state, e.g. [\"San Francisco, CA\", \"New York, NY\"]"},
         "format": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"}}, "required": ["locations"]})"},
    {"kitchensink", "A function with various complex schemas.",
     R"({"description": "params object", "type": "object", "properties": {
         "string": {"type": "string", "title": "STRING", "description": "A string", "examples": ["hello", "world"]},
         "string_nullable": {"type": "string", "nullable": true, "description": "A nullable string", "default": "the default"},
         "string_enum": {"type": "string", "enum": ["a", "b", "c"]},
         "oneof_string_or_number": {"oneOf": [{"type": "string", "default": "default_string_in_oneof"},
           {"type": "number", "description": "numbers can happen too"}], "description": "a oneof", "default": 20}}})"}};

std::vector<HarmonyNamespace> browser() {
  return {
      {"browser",
       "Tool for browsing.\nThe `cursor` appears in brackets before each browsing display: `[{cursor}]`.\n"
       "Cite information from the tool using the following format:\n"
       "`【{cursor}†L{line_start}(-L{line_end})?】`, for example: `【6†L9-L11】` or `【8†L3】`.\n"
       "Do not quote more than 10 words directly from the tool output.\nsources=web (default: web)",
       {{"search", "Searches for information related to `query` and displays `topn` results.",
         R"({"type": "object", "properties": {"query": {"type": "string"}, "topn": {"type": "number", "default": 10},
                 "source": {"type": "string"}}, "required": ["query"]})"},
        {"open",
         "Opens the link `id` from the page indicated by `cursor` starting at line number `loc`, showing `num_lines` "
         "lines.\nValid link ids are displayed with the formatting: `【{id}†.*】`.\nIf `cursor` is not provided, the "
         "most recent page is implied.\nIf `id` is a string, it is treated as a fully qualified URL associated with "
         "`source`.\nIf `loc` is not provided, the viewport will be positioned at the beginning of the document or "
         "centered on the most relevant passage, if available.\nUse this function without `id` to scroll to a new "
         "location of an opened page.",
         R"({"type": "object", "properties": {"id": {"type": ["number", "string"], "default": -1},
                 "cursor": {"type": "number", "default": -1}, "loc": {"type": "number", "default": -1},
                 "num_lines": {"type": "number", "default": -1}, "view_source": {"type": "boolean", "default": false},
                 "source": {"type": "string"}}})"},
        {"find", "Finds exact matches of `pattern` in the current page, or the page given by `cursor`.",
         R"({"type": "object", "properties": {"pattern": {"type": "string"},
                 "cursor": {"type": "number", "default": -1}}, "required": ["pattern"]})"}}}};
}

// The published rendering of a conversation, by the name of its file.
struct Golden {
  const char* file;
  std::vector<HarmonyMessage> conversation;
  bool prompt = true, drop = true;
};
std::vector<Golden> goldens() {
  const std::vector<std::string> two = {"analysis", "final"};
  HarmonyMessage call = {.role = Role::assistant,
                         .recipient = "functions.lookup_weather",
                         .channel = "commentary",
                         .content_type = "<|constrain|>json",
                         .content = "{\"location\": \"San Francisco\"}"};
  const HarmonyMessage result = {.role = Role::tool,
                                 .name = "functions.lookup_weather",
                                 .content = "{\"temperature\": 20, \"description\": \"sunny\"}"};
  const std::vector<HarmonyMessage> sums = {
      user("What is 2 + 2?"), says("analysis", "User asks a simple question: \"What is 2 + 2?\" The answer: 4."),
      says("final", "2 + 2 equals 4."), user("What about 9 / 2?")};
  std::vector<HarmonyNamespace> with_python = browser();
  with_python.push_back(
      {"python",
       "Use this tool to execute Python code in your chain of thought. The code will not be shown to the user. This "
       "tool "
       "should be used for internal reasoning, but not for code that is intended to be visible to the user (e.g. when "
       "creating plots, tables, or files).\n\nWhen you send a message containing Python code to python, it will be "
       "executed in a stateful Jupyter notebook environment. python will respond with the output of the execution or "
       "time "
       "out after 120.0 seconds. The drive at '/mnt/data' can be used to save and persist user files. Internet access "
       "for "
       "this session is UNKNOWN. Depends on the cluster.",
       {}});
  const std::string date = "2025-06-28";
  const std::vector<HarmonyFunction> lookup = {
      {"lookup_weather",
       "Use this tool to lookup the weather in a given location. Call it with the parameter 'location', can be any "
       "textual "
       "description of a location.",
       R"({"type": "object", "properties": {"location": {"type": "string"}}, "required": ["location"]})"}};
  const auto capital = [&](const char* effort, bool robot) {
    std::vector<HarmonyMessage> c = {system({.reasoning = effort})};
    if (robot) c.push_back(developer("Answer the user's questions like a robot."));
    c.push_back(user("What is the capital of the largest country in the world?"));
    return c;
  };
  return {
      {"test_simple_convo", {system({}), user("What is 2 + 2?")}},
      {"test_simple_convo_low_effort", capital("low", true)},
      {"test_simple_convo_low_effort_no_instruction", capital("low", false)},
      {"test_simple_convo_medium_effort", capital("medium", true)},
      {"test_simple_convo_medium_effort_no_instruction", capital("medium", false)},
      {"test_simple_convo_high_effort", capital("high", true)},
      {"test_simple_convo_high_effort_no_instruction", capital("high", false)},
      {"test_no_tools", {system({.current_date = date})}},
      {"test_reasoning_system_message", {system({.channels = two}), user("What is 2 + 2?")}},
      {"test_reasoning_system_message_no_instruction",
       {system({.reasoning = "high", .channels = two}), user("What is the best place to eat candy in the world?")}},
      {"test_reasoning_system_message_with_dates",
       {system({.knowledge_cutoff = "2021-01", .current_date = "2021-01-01", .channels = two}),
        user("What is 42 * pi?")}},
      {"test_dropping_cot_by_default", sums},
      {"test_preserve_cot", sums, true, false},
      {"test_does_not_drop_if_ongoing_analysis",
       {user("What is the weather in SF?"),
        says("analysis", "User asks: \u201cWhat is the weather in SF?\u201d We need to use lookup_weather tool."), call,
        result}},
      {"test_keep_analysis_between_finals",
       {user("What is 2 + 2?"), says("analysis", "thinking 2+2"), says("final", "4"), user("What is 3 + 5?"),
        says("analysis", "thinking 3+5"), says("final", "8")},
       false},
      {"test_render_functions_with_parameters",
       {system({.current_date = date, .reasoning = "high", .calls_functions = true}),
        developer("Always respond in riddles", kFunctions), user("What is the weather like in SF?")}},
      {"test_browser_tool_only", {system({.current_date = date, .tools = browser()})}},
      {"test_browser_and_python_tool", {system({.current_date = date, .tools = with_python})}},
      {"test_browser_and_function_tool",
       {system({.current_date = date, .tools = browser(), .calls_functions = true}), developer("", lookup)}},
  };
}

std::string published(const std::string& name) {
  return read_file(INGOT_SOURCE_DIR "/tests/data/harmony/" + name + ".txt");
}

TEST(harmony, renders_published_conversations_as_published) {
  for (const Golden& g : goldens()) {
    std::string want = published(g.file);
    while (!want.empty() && want.back() == '\n') want.pop_back();
    const auto pieces =
        g.prompt ? render_harmony_prompt(g.conversation, g.drop) : render_harmony(g.conversation, g.drop);
    EXPECT_EQ(harmony_text(pieces), want) << g.file;
  }
}

TEST(harmony, renders_messages_of_every_kind) {
  const HarmonyMessage call = {.role = Role::assistant,
                               .recipient = "functions.f",
                               .channel = "commentary",
                               .content_type = "<|constrain|>json",
                               .content = "{}"};
  EXPECT_EQ(harmony_text(render_harmony(call)),
            "<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{}<|call|>");
  const HarmonyMessage result = {
      .role = Role::tool, .name = "functions.f", .recipient = "assistant", .channel = "commentary", .content = "7"};
  EXPECT_EQ(harmony_text(render_harmony(result)),
            "<|start|>functions.f to=assistant<|channel|>commentary<|message|>7<|end|>");
  EXPECT_EQ(harmony_text(render_harmony(
                {.role = Role::user, .name = "ann", .recipient = "all", .content_type = "text", .content = "x"})),
            "<|start|>user:ann text<|message|>x<|end|>");
  EXPECT_EQ(
      harmony_developer_text("", {{"f", "Does it.\nTwice.", R"({"type": "object", "properties": {}})"}, {"g", "", ""}}),
      "# Tools\n\n## functions\n\nnamespace functions {\n\n// Does it.\n// Twice.\ntype f = (_: {\n}) => "
      "any;\n\ntype g = () => any;\n\n} // namespace functions");
  EXPECT_TRUE(error_of([] { harmony_type("{\"type\": "); }).starts_with("bad data: parameters: byte "));
}

TEST(harmony, renders_a_whole_conversation) {
  const HarmonySystem about = {.current_date = "2026-01-02", .reasoning = "high", .calls_functions = true};
  const std::vector<HarmonyFunction> functions = {{"roll", "Rolls dice.",
                                                   R"({"type": "object", "properties": {
           "sides": {"type": "integer", "description": "of each", "default": 6},
           "rule": {"type": "string", "enum": ["sum", "best"], "default": "sum"},
           "at": {"type": "object", "properties": {"x": {"type": ["number", "null"]}}, "required": ["x"]},
           "tags": {"type": "array", "items": {"type": "string"}}, "any": {}}, "required": ["sides"]})"}};
  const std::vector<HarmonyMessage> conversation = {system(about), developer("Be brief.", functions), user("Roll."),
                                                    says("analysis", "hm"), says("final", "4")};
  const std::string head =
      "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: "
      "2024-06\nCurrent date: 2026-01-02\n\nReasoning: high\n\n# Valid channels: analysis, commentary, final. Channel "
      "must be included for every message.\nCalls to these tools must go to the commentary channel: "
      "'functions'.<|end|><|start|>developer<|message|># Instructions\n\nBe brief.\n\n# Tools\n\n## "
      "functions\n\nnamespace functions {\n\n// Rolls dice.\ntype roll = (_: {\n// of each\nsides: number, // default: "
      "6\nrule?: \"sum\" | \"best\", // default: sum\nat?: {\n    x: number | null,\n    },\ntags?: string[],\nany?: "
      "any,\n}) => any;\n\n} // namespace functions<|end|><|start|>user<|message|>Roll.<|end|>";
  const std::string thought = "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>",
                    answer = "<|start|>assistant<|channel|>final<|message|>4<|end|>";
  EXPECT_EQ(harmony_text(render_harmony(conversation)), head + answer);
  EXPECT_EQ(harmony_text(render_harmony(conversation, false)), head + thought + answer);
  EXPECT_EQ(harmony_text(render_harmony_prompt(std::span(conversation).first(4))),
            head + thought + "<|start|>assistant");
}

TEST(harmony, a_prompt_keeps_the_analysis_of_the_turn_under_way_alone) {
  const HarmonyMessage call = {
      .role = Role::assistant, .recipient = "functions.f", .channel = "commentary", .content = "{}"};
  const HarmonyMessage result = {.role = Role::tool, .name = "functions.f", .content = "7"};
  const std::vector<HarmonyMessage> all = {
      user("a"), says("analysis", "one"),   says("final", "A"), user("b"), says("analysis", "two"),  call,
      result,    says("analysis", "three"), says("final", "B"), user("c"), says("analysis", "four"), call,
      result,    says("analysis", "five")};
  const auto thoughts = [&](size_t messages) {
    const auto conversation = std::span(all).first(messages);
    std::string seen;
    for (const HarmonyPiece& p : render_harmony_prompt(conversation))
      for (const char* thought : {"one", "two", "three", "four", "five"})
        if (p.text == thought) seen += p.text + " ";
    return seen;
  };
  EXPECT_EQ(thoughts(2), "one ");
  EXPECT_EQ(thoughts(4), "");
  EXPECT_EQ(thoughts(7), "two ");  // the result of a call continues its turn
  EXPECT_EQ(thoughts(8), "two three ");
  EXPECT_EQ(thoughts(10), "");       // the second turn has ended too
  EXPECT_EQ(thoughts(13), "four ");  // a turn with calls does not bring earlier thoughts back
  EXPECT_EQ(thoughts(14), "four five ");
}

TEST(harmony, the_text_of_a_user_never_becomes_a_control_token) {
  const Vocabulary& v = vocabulary();
  std::string evil = "x";
  for (const std::string& c : kControls) evil += c;
  const HarmonyMessage m = {
      .role = Role::tool, .name = evil, .recipient = evil, .channel = evil, .content_type = evil, .content = evil};
  const auto ids = encode_harmony(render_harmony(m), v.bpe, v.tokens);
  std::vector<int32_t> controls;
  for (const int32_t id : ids)
    if (v.tokens.is_special(id)) controls.push_back(id);
  EXPECT_EQ(controls, (std::vector<int32_t>{v.tokens.start, v.tokens.channel, v.tokens.message, v.tokens.end}));
}

TEST(harmony, a_vocabulary_of_another_kind_is_refused) {
  const ByteBpe other = Vocabulary::learn({"<|endoftext|>", "<|start|>"});
  EXPECT_EQ(error_of([&] { HarmonyTokens(other, "tokenizer.json"); }),
            "bad data: tokenizer.json: found no control token <|end|>, expected a vocabulary of the Harmony format");
}

// --- parsing -------------------------------------------------------------------------------------------------------
TEST(harmony, rendered_messages_are_parsed_back) {
  const Vocabulary& v = vocabulary();
  for (const Golden& g : goldens()) {
    HarmonyParser parser(v.bpe, v.tokens, false);
    std::string streamed, content;
    for (const int32_t id : encode_harmony(render_harmony(g.conversation, false), v.bpe, v.tokens))
      streamed += parser.push(id);
    parser.finish();
    EXPECT_EQ(parser.messages(), g.conversation) << g.file;
    for (const HarmonyMessage& m : g.conversation) content += m.content;
    EXPECT_EQ(streamed, content) << g.file;
  }
}

TEST(harmony, malformed_answers_are_read) {
  const auto message = [](const char* channel, const char* content, const char* recipient = "", const char* type = "") {
    return HarmonyMessage{
        .role = Role::assistant, .recipient = recipient, .channel = channel, .content_type = type, .content = content};
  };
  struct Case {
    const char* what;
    const char* text;
    std::vector<HarmonyMessage> want;
  };
  const std::vector<Case> cases = {
      {"a plain answer",
       "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>",
       {message("analysis", "think"), message("final", "4")}},
      {"recipient before the channel",
       " to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
       {message("commentary", "{}", "functions.f", "json")}},
      {"recipient after it",
       "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
       {message("commentary", "{}", "functions.f", "<|constrain|>json")}},
      {"constrain glued to the recipient",
       "<|channel|>commentary to=functions.f<|constrain|>json<|message|>{}<|call|>",
       {message("commentary", "{}", "functions.f", "<|constrain|>json")}},
      {"constrain as recipient",
       "<|channel|>commentary to=<|constrain|>json<|message|>{}<|call|>",
       {message("commentary", "{}", "", "<|constrain|>json")}},
      {"constrain before the channel",
       "<|constrain|>json<|channel|>commentary<|message|>{}<|call|>",
       {message("commentary", "{}", "", "<|constrain|>json")}},
      {"a control token spelled in a name",
       "<|channel|>commentary to=functions.f<|cons<|message|>{}<|call|>",
       {message("commentary", "{}", "functions.f")}},
      {"a misspelt channel",
       "<|channel|>\u2013\u2013commentary to=functions.f<|message|>x<|call|>",
       {message("commentary", "x", "functions.f")}},
      {"no channel", "<|message|>x<|end|>", {message("", "x")}},
      {"a channel without its mark",
       "commentary to=functions.f<|message|>{}<|call|>",
       {message("commentary", "{}", "functions.f")}},
      {"a channel without its mark behind a space", " final<|message|>x<|return|>", {message("final", "x")}},
      {"two channels", "<|channel|>analysis<|channel|>final<|message|>x<|return|>", {message("final", "x")}},
      {"two messages without a start",
       "<|channel|>analysis<|message|>a<|channel|>final<|message|>b<|return|>",
       {message("analysis", "a"), message("final", "b")}},
      {"a start without an end",
       "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b",
       {message("analysis", "a"), message("final", "b")}},
      {"a role without a start",
       "<|channel|>analysis<|message|>a<|end|>assistant<|channel|>final<|message|>b<|return|>",
       {message("analysis", "a"), message("final", "b")}},
      {"text after an end",
       "<|channel|>final<|message|>a<|end|>and more",
       {message("final", "a"), message("", "and more")}},
      {"text between messages",
       "<|channel|>analysis<|message|>a<|end|>now then<|channel|>final<|message|>b<|return|>",
       {message("analysis", "a"), message("final", "b")}},
      {"a call of a call that goes on",
       "<|channel|>commentary to=f json<|message|>{<|call|><|start|>f to=assistant<|channel|>commentary<|message|>7",
       {message("commentary", "{", "f", "json"),
        {.role = Role::tool, .name = "f", .recipient = "assistant", .channel = "commentary", .content = "7"}}},
      {"an end of text", "<|channel|>final<|message|>a<|endoftext|>", {message("final", "a")}},
      {"reserved tokens",
       "<|channel|>final<|reserved|><|message|>a<|reserved|>b<|startoftext|><|return|>",
       {message("final", "ab")}},
      {"control tokens in content",
       "<|channel|>final<|message|>a<|constrain|><|message|>b<|return|>",
       {message("final", "ab")}},
      {"a cut inside the header", "<|channel|>commentary to=functions.f", {message("commentary", "", "functions.f")}},
      {"a stop inside the header",
       "<|channel|>commentary to=functions.f<|call|>",
       {message("commentary", "", "functions.f")}},
      {"a start and no more", "<|channel|>final<|message|>a<|end|><|start|>assistant", {message("final", "a")}},
      {"a role and no more", "<|channel|>final<|message|>a<|end|>assistant", {message("final", "a")}},
      {"no header at all", "I am fine<|return|>", {message("", "I am fine")}},
      {"nothing", "", {}},
      {"only an end", "<|return|>", {}},
  };
  for (const Case& c : cases) EXPECT_EQ(vocabulary().parse(c.text), c.want) << c.what;
}

// Published answers: some as text, some as ids of the published vocabulary, of which only the words in headers are
// needed.
TEST(harmony, reads_published_answers_as_published) {
  const HarmonyMessage page = {.role = Role::tool,
                               .name = "browser.search",
                               .recipient = "assistant",
                               .channel = "commentary",
                               .content = "{\"result\": \"https://openai.com/\"}"};
  const auto streamed = vocabulary().parse(published("test_streamable_parser"));
  ASSERT_EQ(streamed.size(), 3u);
  EXPECT_EQ(streamed[0].channel, "analysis");
  EXPECT_TRUE(streamed[0].content.starts_with("User asks \"Who is") && streamed[0].content.ends_with("to confirm."));
  EXPECT_EQ(streamed[1],
            (HarmonyMessage{
                .role = Role::assistant,
                .recipient = "browser.search",
                .channel = "commentary",
                .content_type = "code",
                .content = "{\"query\": \"current US president July 2025\", \"topn\": 10, \"source\": \"news\"}"}));
  EXPECT_EQ(streamed[2], page);
  HarmonyMessage open = page;
  open.content += " ";
  EXPECT_EQ(vocabulary().parse(published("test_tool_response_parsing"), false), std::vector<HarmonyMessage>{open});

  // For answers given as ids, words in headers have their published ids, and every other id a text of its own.
  ByteBpeRules rules{.pattern = WordPattern::o200k};
  rules.tokens.resize(200013);
  for (int b = 0; b < 256; ++b) rules.tokens[size_t(b)] = char(b);
  for (size_t i = 256; i < rules.tokens.size(); ++i) rules.tokens[i] = "{" + std::to_string(i) + "}";
  const std::map<size_t, const char*> words = {
      {35644, "analysis"},  {17196, "final"},  {173781, "assistant"},
      {316, " to"},         {29712, "lookup"}, {3490, " code"},
      {170154, "_weather"}, {28, "="},         {rules.tokens.size() - 100, "\xf0"}};
  for (const auto& [id, word] : words) rules.tokens[id] = word;
  rules.tokens['='] = "\x1c";  // the published vocabulary orders bytes differently
  const std::map<int, const char*> controls = {
      {200002, "<|return|>"}, {200003, "<|constrain|>"},   {200005, "<|channel|>"},
      {200006, "<|start|>"},  {200007, "<|end|>"},         {200008, "<|message|>"},
      {200012, "<|call|>"},   {199998, "<|startoftext|>"}, {199999, "<|endoftext|>"}};
  for (const auto& [id, name] : controls) {
    rules.tokens[size_t(id)].clear();
    rules.specials.push_back({id, name});
  }
  rules.tokens[rules.tokens.size() - 100] = "{other}";
  const ByteBpe bpe(rules);
  const HarmonyTokens tokens(bpe, "test");
  const auto parse = [&](const char* name) {
    HarmonyParser parser(bpe, tokens);
    std::istringstream ids(published(name));
    for (int32_t id; ids >> id;) parser.push(id);
    parser.finish();
    return parser.messages();
  };
  const auto simple = parse("test_simple_reasoning_response"), call = parse("test_simple_tool_call");
  ASSERT_EQ(simple.size(), 2u);
  EXPECT_EQ(simple[0].channel, "analysis");
  EXPECT_EQ(simple[1].channel, "final");
  ASSERT_EQ(call.size(), 2u);
  EXPECT_EQ(call[0].channel, "analysis");
  EXPECT_EQ(call[1].recipient, "lookup_weather");
  EXPECT_EQ(call[1].channel, "analysis");
  EXPECT_EQ(call[1].content_type, "code");
  for (const auto& m : {simple[0], simple[1], call[0], call[1]}) {
    EXPECT_EQ(m.role, Role::assistant);
    EXPECT_FALSE(m.content.empty());
  }
}

TEST(harmony, a_character_split_over_tokens_is_shown_whole) {
  const Vocabulary& v = vocabulary();
  HarmonyParser parser(v.bpe, v.tokens);
  for (const int32_t id : v.ids("<|channel|>final<|message|>")) parser.push(id);
  std::string text;
  for (const int32_t id : v.ids("a\u2020\U0001F600b")) {
    const std::string piece = parser.push(id);
    EXPECT_TRUE(valid(piece));
    text += piece;
  }
  EXPECT_EQ(text, "a\u2020\U0001F600b");
  // An answer that ends inside a character gets a replacement character, also in the streamed text.
  parser.push(v.bpe.encode("\u2020")[0]);
  EXPECT_EQ(parser.push(v.tokens.answer_end), "\uFFFD");
  EXPECT_EQ(parser.messages()[0].content, "a\u2020\U0001F600b\uFFFD");
}

TEST(harmony, random_ids_never_fail_and_never_show_a_control_token) {
  const Vocabulary& v = vocabulary();
  const Rng rng(3, Purpose::test);
  uint64_t draw = 0;
  for (int round = 0; round < 3000; ++round) {
    HarmonyParser parser(v.bpe, v.tokens, round % 2 == 0);
    std::string streamed, whole;
    for (int i = 0; i < 40; ++i) {
      const bool control = rng.below(draw++, 3) == 0;
      const int32_t id = control ? int32_t(rng.below(draw++, kControls.size()))
                                 : int32_t(rng.below(draw++, uint64_t(v.bpe.vocab_size()) + 3)) - 1;
      streamed += parser.push(id);
    }
    parser.finish();
    for (const HarmonyMessage& m : parser.messages())
      for (const std::string& field : {m.name, m.recipient, m.channel, m.content}) {
        EXPECT_TRUE(valid(field));
        for (const std::string& c : kControls) EXPECT_EQ(field.find(c), std::string::npos);
      }
    EXPECT_TRUE(valid(streamed));
    // The parsed messages are a conversation: rendered and parsed again they are the same.
    HarmonyParser again(v.bpe, v.tokens, false);
    for (const int32_t id : encode_harmony(render_harmony(parser.messages(), false), v.bpe, v.tokens)) again.push(id);
    again.finish();
    EXPECT_EQ(again.messages(), parser.messages()) << round;
  }
}

}  // namespace
}  // namespace ingot
