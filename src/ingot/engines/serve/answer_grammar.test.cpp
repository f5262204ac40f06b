#include "ingot/engines/serve/answer_grammar.h"

#include <gtest/gtest.h>

#include "ingot/text/chat/harmony_bytes.test.h"

namespace ingot {
namespace {

// Bytes, and control tokens by their names.
bool accepts(const ApiRequest& r, const std::string& answer) {
  static const std::vector<std::string> controls = {"<|start|>",     "<|end|>",    "<|message|>", "<|channel|>",
                                                    "<|constrain|>", "<|return|>", "<|call|>"};
  Grammar g;
  const Grammar::Rule rule = answer_grammar(g, r, testing::harmony_format());
  GrammarWalk walk(std::move(g), rule);
  int32_t state = walk.start();
  for (size_t at = 0; at < answer.size() && state != GrammarWalk::kDead;) {
    size_t control = 0;
    while (control < controls.size() && answer.compare(at, controls[control].size(), controls[control]) != 0) ++control;
    const bool is_control = control < controls.size();
    state = walk.next(state, is_control ? Grammar::kFirstControl + int(control) : int(uint8_t(answer[at])));
    at += is_control ? controls[control].size() : 1;
  }
  return state != GrammarWalk::kDead && walk.complete(state);
}
ApiRequest request(const std::string& more) {
  return parse_api_request(R"({"messages": [{"role": "user", "content": "Hi"}], )" + more + "}", true);
}
const std::string kTools = R"("tools": [
  {"type": "function", "function": {"name": "f", "strict": true, "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}},
  {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "properties": {"y": {"type": "null"}}, "required": ["y"]}}},
  {"type": "function", "function": {"name": "h"}}])";
const std::string kThought = "<|channel|>analysis<|message|>any \xff thing {<|end|><|start|>assistant";
std::string final_of(const std::string& text) { return "<|channel|>final<|message|>" + text + "<|return|>"; }
std::string call_of(const std::string& name, const std::string& arguments) {
  return "<|channel|>commentary to=functions." + name + " <|constrain|>json<|message|>" + arguments + "<|call|>";
}

TEST(answer_grammar, only_requests_with_a_prescribed_form_have_a_grammar) {
  EXPECT_FALSE(has_grammar(request(R"("n": 1)")));
  EXPECT_FALSE(has_grammar(request(R"("response_format": {"type": "text"})")));
  EXPECT_FALSE(has_grammar(request(R"("tools": [{"type": "function", "function": {"name": "f"}}])")));
  EXPECT_FALSE(has_grammar(request(kTools + R"(, "tool_choice": "none")")));
  EXPECT_TRUE(has_grammar(request(kTools)));
  EXPECT_TRUE(has_grammar(request(R"("response_format": {"type": "json_object"})")));
}

TEST(answer_grammar, the_final_text_is_json_and_thoughts_are_free) {
  const ApiRequest r = request(R"("response_format": {"type": "json_object"})");
  EXPECT_TRUE(accepts(r, final_of("{\"a\": [1]}")));
  EXPECT_TRUE(accepts(r, kThought + kThought + final_of("{}")));
  EXPECT_TRUE(accepts(r, kThought + "<|channel|>final <|constrain|>json<|message|>{}<|return|>"));
  for (const std::string bad :
       {final_of("Sure: {}"), final_of("{"), final_of("[]"), final_of("{}x"), kThought, std::string(),
        std::string("<|channel|>commentary<|message|>Hi<|end|><|start|>assistant") + final_of("{}"),
        std::string("<|channel|>final<|message|>{}<|end|>"), std::string("<|message|>{}<|return|>"),
        std::string("<|channel|>other<|message|>{}<|return|>"), call_of("f", "{}")})
    EXPECT_FALSE(accepts(r, bad)) << bad;
}

TEST(answer_grammar, a_forced_call_without_strict_follows_the_enforceable_parts_of_its_schema) {
  const std::string schema =
      R"({"type": "object", "properties": {"x": {"type": "integer", "minimum": 1}, "y": {"type": "array", "uniqueItems": true}}, "required": ["x"]})";
  const auto forced = [&](const char* strict) {
    return request(R"("tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f", "strict": )" +
                   std::string(strict) + R"(, "parameters": )" + schema + "}}]");
  };
  EXPECT_TRUE(accepts(forced("false"), call_of("f", R"({"x": 1, "y": [2, 2]})")));
  for (const char* bad : {R"({"x": 0})", R"({"x": "1"})", R"({"y": []})", "[]"})
    EXPECT_FALSE(accepts(forced("false"), call_of("f", bad))) << bad;
  Grammar g;
  try {
    answer_grammar(g, forced("true"), testing::harmony_format());
    FAIL();
  } catch (const ApiError& e) { EXPECT_EQ(e.param, "tools.f.parameters.properties.y.uniqueItems"); }
}

TEST(answer_grammar, a_forced_call_names_an_allowed_function_and_its_arguments_follow_the_schema) {
  const ApiRequest any = request(kTools + R"(, "tool_choice": "required")");
  EXPECT_TRUE(accepts(any, kThought + call_of("f", R"({"x": 1})")));
  EXPECT_TRUE(accepts(any, call_of("g", R"({"y":null})")));
  EXPECT_TRUE(accepts(any, call_of("h", "{}")));
  EXPECT_TRUE(accepts(any, " to=functions.g<|channel|>commentary<|message|>{\"y\":null}<|call|>"));
  for (const std::string& bad :
       {call_of("f", "{}"), call_of("g", R"({"y":1})"), call_of("h", R"({"a":1})"), call_of("i", "{}"), final_of("Hi")})
    EXPECT_FALSE(accepts(any, bad)) << bad;
  const ApiRequest named = request(kTools + R"(, "tool_choice": {"type": "function", "function": {"name": "g"}})");
  EXPECT_TRUE(accepts(named, call_of("g", R"({"y":null})")));
  EXPECT_FALSE(accepts(named, call_of("f", R"({"x":1})")));
}

TEST(answer_grammar, a_strict_function_is_called_with_its_schema_or_not_at_all) {
  const ApiRequest r = request(kTools);
  EXPECT_TRUE(accepts(r, kThought + final_of("Hello \xff")));
  EXPECT_TRUE(
      accepts(r, "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + call_of("f", R"({"x":-3})")));
  EXPECT_TRUE(accepts(r, call_of("g", R"({"anything": true})")));  // not strict: an object
  EXPECT_FALSE(accepts(r, call_of("f", R"({"x":"3"})")));
  EXPECT_FALSE(accepts(r, call_of("g", "[]")));
}

TEST(answer_grammar, an_unsupported_schema_is_a_client_s_error_that_names_the_place) {
  const auto refusal = [](const std::string& more) {
    try {
      Grammar g;
      answer_grammar(g, request(more), testing::harmony_format());
    } catch (const ApiError& e) { return std::to_string(e.status) + " " + e.param; }
    return std::string("accepted");
  };
  const std::string bad = R"({"type": "object", "properties": {"a": {"type": "string", "pattern": "\\b"}}})";
  EXPECT_EQ(
      refusal(R"("response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": )" + bad + "}}"),
      "400 response_format.json_schema.schema.properties.a.pattern");
  const std::string tools = R"("tools": [{"type": "function", "function": {"name": "f", "parameters": )" + bad;
  EXPECT_EQ(refusal(tools + R"(, "strict": true}}])"), "400 tools.f.parameters.properties.a.pattern");
  EXPECT_EQ(refusal(tools + R"(}}], "tool_choice": "required")"), "accepted");
  EXPECT_EQ(refusal(tools + "}}]"), "accepted");
}

}  // namespace
}  // namespace ingot
