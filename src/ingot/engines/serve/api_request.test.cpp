#include "ingot/engines/serve/api_request.h"

#include <gtest/gtest.h>

#include <array>

#include "ingot/io/json.h"
#include "ingot/text/chat/harmony_format.h"

namespace ingot {
namespace {

std::string chat_with(const std::string& more) {
  return R"({"messages": [{"role": "user", "content": "Hi"}])" + (more.empty() ? "" : ", " + more) + "}";
}
std::string completion_with(const std::string& more) { return R"({"prompt": "Hi", )" + more + "}"; }

// "<param>|<code>|<message>" of the refusal, or "accepted".
std::string refusal(const std::string& body, bool chat, const ApiLimits& limits = {}) {
  try {
    parse_api_request(body, chat, limits);
  } catch (const ApiError& e) {
    EXPECT_EQ(e.status, 400);
    return e.param + "|" + e.code + "|" + e.what();
  }
  return "accepted";
}
void expect_refusal(const std::string& body, bool chat, const std::string& expected) {
  EXPECT_EQ(refusal(body, chat).substr(0, expected.size()), expected) << body;
}

TEST(api_request, a_completion_has_the_defaults_of_openai) {
  const ApiRequest r = parse_api_request(R"({"prompt": "Once"})", false);
  ASSERT_EQ(r.prompts.size(), 1u);
  EXPECT_EQ(r.prompts[0].text, "Once");
  EXPECT_EQ(r.tokens, 16);
  EXPECT_EQ(r.n, 1);
  EXPECT_EQ(r.logprobs, -1);
  EXPECT_FALSE(r.seed.has_value() || r.stream || r.stream_usage);
  EXPECT_EQ(r.sampling.temperature, 1);
  EXPECT_EQ(parse_api_request(chat_with(""), true).tokens, -1);
}

TEST(api_request, every_field_is_read) {
  const ApiRequest r = parse_api_request(
      completion_with(
          R"("model": "m", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "n": 2,
        "seed": -1, "stop": ["a", "b"], "logprobs": 3, "logit_bias": {"5": -100}, "stream": true, "user": "u",
        "stream_options": {"include_usage": true}, "presence_penalty": 0, "echo": false, "suffix": null)"),
      false);
  EXPECT_EQ(r.model, "m");
  EXPECT_EQ(r.tokens, 5);
  EXPECT_EQ(r.sampling.temperature, 0.5);
  EXPECT_EQ(r.sampling.top_p, 0.9);
  EXPECT_EQ(r.sampling.top_k, 3);
  EXPECT_EQ(r.sampling.min_p, 0.1);
  EXPECT_EQ(r.n, 2);
  EXPECT_EQ(r.seed, UINT64_MAX);
  EXPECT_EQ(r.stop, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(r.logprobs, 3);
  ASSERT_EQ(r.bias.size(), 1u);
  EXPECT_EQ(r.bias[0].id, 5);
  EXPECT_EQ(r.bias[0].bias, -100);
  EXPECT_TRUE(r.stream && r.stream_usage);
}

TEST(api_request, prompts_are_text_or_ids_one_or_several) {
  const auto prompts = [](const std::string& p) { return parse_api_request("{\"prompt\": " + p + "}", false).prompts; };
  EXPECT_EQ(prompts(R"(["a", "b"])")[1].text, "b");
  EXPECT_EQ(prompts("[1, 2]")[0].ids, (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(prompts("[[1, 2], [3]]")[1].ids, (std::vector<int32_t>{3}));
}

TEST(api_request, top_p_of_zero_leaves_the_likeliest_token) {
  const double p = parse_api_request(completion_with(R"("top_p": 0)"), false).sampling.top_p;
  EXPECT_GT(p, 0);
  EXPECT_LT(p, 1e-6);
}

TEST(api_request, min_p_of_one_is_the_share_of_the_likeliest_token_itself) {
  EXPECT_EQ(parse_api_request(completion_with(R"("min_p": 1)"), false).sampling.min_p, 1);
}

TEST(api_request, the_newer_name_of_the_limit_wins) {
  EXPECT_EQ(parse_api_request(chat_with(R"("max_completion_tokens": 3, "max_tokens": 9)"), true).tokens, 3);
  EXPECT_EQ(parse_api_request(chat_with(R"("max_tokens": 9)"), true).tokens, 9);
}

TEST(api_request, bad_bodies_are_refused_by_the_field_s_name) {
  for (const auto& [body, expected] : std::vector<std::pair<std::string, std::string>>{
           {"", "body|invalid_json|body: byte 0"},
           {"{", "body|invalid_json|body: byte 1"},
           {"{\"prompt\": \"\xff\"}", "body|invalid_json|body: byte"},
           {R"({"prompt": "a", "prompt": "b"})", "body|invalid_json|body: byte"},
           {"[]", "body||body: found empty array, expected an object"},
           {"{}", "prompt||prompt: it is missing"},
           {R"({"prompt": null})", "prompt||prompt: it is missing"},
           {R"({"prompt": []})", "prompt||prompt: found empty array, expected a string, strings, token ids"},
           {R"({"prompt": [[]]})", "prompt[0]||prompt[0]: found an empty list, expected at least one id"},
           {R"({"prompt": [1, "a"]})", "prompt[1]||prompt[1]: found string \"a\", expected an integer from 0"},
           {R"({"prompt": ["a", 1]})", "prompt[1]||prompt[1]: found number 1, expected a string or a list"},
           {R"({"prompt": [2147483648]})", "prompt[0]||prompt[0]: found number 2147483648, expected an integer"},
           {R"({"prompt": [-1]})", "prompt[0]||"},
           {completion_with(R"("max_tokens": 0)"),
            "max_tokens||max_tokens: found number 0, expected an integer from 1"},
           {completion_with(R"("max_tokens": -1)"), "max_tokens||"},
           {completion_with(R"("max_tokens": 9223372036854775808)"), "max_tokens||"},
           {completion_with(R"("max_tokens": 1e3)"), "max_tokens||"},
           {completion_with(R"("max_tokens": "5")"), "max_tokens||max_tokens: found string \"5\", expected an integer"},
           {completion_with(R"("n": 1000000)"), "n||n: found number 1000000, expected an integer from 1 to 8"},
           {completion_with(R"("n": 0)"), "n||"},
           {R"({"prompt": ["a", "b", "c"], "n": 3})", "n||n: found 3 of 3 prompts, expected at most 8 choices"},
           {completion_with(R"("temperature": 2.1)"),
            "temperature||temperature: found number 2.1, expected a number from 0"},
           {completion_with(R"("temperature": true)"), "temperature||"},
           {completion_with(R"("logprobs": 21)"), "logprobs||"},
           {completion_with(R"("logprobs": true)"), "logprobs||"},
           {completion_with(R"("seed": 1.5)"), "seed||"},
           {completion_with(R"("stop": ["a", "b", "c", "d", "e"])"), "stop||stop: found 5 strings, expected at most 4"},
           {completion_with(R"("stop": {})"), "stop||stop: found object, expected a string or a list of strings"},
           {completion_with(R"("min_p": 1.1)"), "min_p||min_p: found number 1.1, expected a number from 0 to 1"},
           {completion_with(R"("stop": "")"), "stop[0]||stop[0]: found 0 bytes, expected 1 to 256"},
           {completion_with(R"("stop": [1])"), "stop[0]||stop[0]: found number 1, expected a string"},
           {completion_with(R"("stop": ")" + std::string(257, 'x') + "\""), "stop[0]||"},
           {completion_with(R"("logit_bias": {"x": 1})"),
            "logit_bias||logit_bias: found the key 'x', expected a token id"},
           {completion_with(R"("logit_bias": {"5": 101})"), "logit_bias.5||"},
           {completion_with(R"("logit_bias": {"99999999999999999999": 1})"), "logit_bias||"},
           {completion_with(R"("stream": 1)"), "stream||stream: found number 1, expected true or false"},
           {completion_with(R"("stream_options": {})"), "stream_options||stream_options: found it without stream"},
           {completion_with(R"("echo": 1)"), "echo||echo: found number 1, expected true or false"},
           {completion_with(R"("max_tokens": 0)"),
            "max_tokens||max_tokens: found number 0, expected an integer from 1"},
           {completion_with(R"("best_of": 2)"), "best_of|unsupported_parameter|"},
           {completion_with(R"("frequency_penalty": 2.5)"), "frequency_penalty||"},
           {completion_with(R"("presence_penalty": "1")"), "presence_penalty||"},
       })
    expect_refusal(body, false, expected);
}

TEST(api_request, bad_chats_are_refused_by_the_field_s_name) {
  const auto message = [](const std::string& m) { return "{\"messages\": [" + m + "]}"; };
  const auto tool = [](const std::string& f) {
    return chat_with(R"("tools": [{"type": "function", "function": )" + f + "}]");
  };
  for (const auto& [body, expected] : std::vector<std::pair<std::string, std::string>>{
           {"{}", "messages||messages: it is missing"},
           {message(""), "messages||messages: found empty array, expected a list of at least one message"},
           {message("1"), "messages[0]||messages[0]: found number 1, expected an object"},
           {message(R"({"content": "a"})"), "messages[0].role||messages[0].role: it is missing"},
           {message(R"({"role": "king", "content": "a"})"),
            "messages[0].role||messages[0].role: found string \"king\""},
           {message(R"({"role": "user"})"), "messages[0].content||messages[0].content: it is missing"},
           {message(R"({"role": "user", "content": 1})"), "messages[0].content||"},
           {message(R"({"role": "user", "content": [{"type": "image_url", "image_url": {}}]})"),
            "messages[0].content[0].type||messages[0].content[0].type: found 'image_url', expected text"},
           {message(R"({"role": "assistant"})"),
            "messages[0].content||messages[0].content: found none, and no tool_calls"},
           {message(R"({"role": "tool", "content": "3"})"), "messages[0].tool_call_id||"},
           {message(R"({"role": "user", "content": "a", "tool_calls": [{}]})"), "messages[0].tool_calls||"},
           {message(R"({"role": "assistant", "content": "a", "function_call": {"name": "f", "arguments": "{}"}})"),
            "messages[0].function_call|unsupported_parameter|"},
           {chat_with(R"("top_logprobs": 2)"), "top_logprobs||top_logprobs: found 2 without logprobs"},
           {chat_with(R"("logprobs": 2)"), "logprobs||logprobs: found number 2, expected true or false"},
           {chat_with(R"("reasoning_effort": "huge")"),
            "reasoning_effort||reasoning_effort: found string \"huge\", expected one of none, minimal, low, medium, "
            "high"},
           {chat_with(R"("tool_choice": "required")"), "tool_choice||"},
           {chat_with(R"("tool_choice": {"type": "function", "function": {"name": "f"}})"), "tool_choice||"},
           {chat_with(R"("tool_choice": "any")"), "tool_choice||"},
           {chat_with(R"("response_format": {"type": "xml"})"),
            "response_format.type||response_format.type: found string \"xml\", expected one of text, json_object, "
            "json_schema"},
           {chat_with(R"("response_format": {})"), "response_format.type||"},
           {chat_with(R"("response_format": {"type": "json_schema"})"), "response_format.json_schema||"},
           {chat_with(R"("response_format": {"type": "json_schema", "json_schema": {"name": "a"}})"),
            "response_format.json_schema.schema||"},
           {chat_with(R"("response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}})"),
            "response_format.json_schema.name||"},
           {chat_with(R"("modalities": ["audio"])"), "modalities|unsupported_parameter|"},
           {tool(R"({"name": "a b"})"),
            "tools[0].function.name||tools[0].function.name: found 'a b', expected 1 to 128"},
           {tool(R"({"name": "<|end|>"})"), "tools[0].function.name||"},
           {tool(R"({"name": ")" + std::string(129, 'x') + "\"}"), "tools[0].function.name||"},
           {tool(R"({"name": "a", "parameters": 1})"), "tools[0].function.parameters||"},
           {tool(R"({"name": "a", "strict": 1})"), "tools[0].function.strict||"},
           {chat_with(R"("tools": [{}])"), "tools[0].type||"},
           {chat_with(R"("chat_template_kwargs": {"model_identity": "You are Bob"})"),
            "chat_template_kwargs.model_identity|unsupported_parameter|"},
           {chat_with(R"("chat_template_kwargs": {"reasoning_effort": 1})"), "chat_template_kwargs.reasoning_effort||"},
       })
    expect_refusal(body, true, expected);
}

TEST(api_request, sizes_are_bounded) {
  EXPECT_EQ(
      refusal(completion_with(R"("user": ")" + std::string(2000, 'x') + "\""), false, {.body = 1000}).substr(0, 18),
      "body|invalid_json|");
  EXPECT_EQ(
      refusal(completion_with("\"metadata\": " + std::string(100, '[') + std::string(100, ']')), false).substr(0, 18),
      "body|invalid_json|");
}

TEST(api_request, a_chat_becomes_the_conversation_that_the_model_knows) {
  const ApiRequest r = parse_api_request(R"({"messages": [
      {"role": "system", "content": "Be brief."}, {"role": "developer", "content": "In French."},
      {"role": "user", "content": [{"type": "text", "text": "Weather "}, {"type": "text", "text": "in Paris?"}]},
      {"role": "assistant", "content": "Let me see.", "reasoning_content": "Ask.",
       "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": 1}"}}]},
      {"role": "tool", "tool_call_id": "c1", "content": "Rain"},
      {"role": "assistant", "content": "Il pleut."}, {"role": "user", "content": "Merci"}],
    "tools": [{"type": "function", "function": {"name": "weather", "description": "Says it.",
      "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}]})",
                                         true);
  ChatConversation conversation = conversation_of(r);
  conversation.effort = "low";
  conversation.date = "2026-01-31";
  const std::vector<HarmonyMessage> c = harmony_messages(conversation);
  ASSERT_EQ(c.size(), 9u);
  EXPECT_EQ(c[0].role, HarmonyRole::system);
  for (const char* line : {"Current date: 2026-01-31", "Reasoning: low", "must go to the commentary channel"})
    EXPECT_NE(c[0].content.find(line), std::string::npos) << line;
  EXPECT_EQ(c[1].role, HarmonyRole::developer);
  for (const char* line : {"# Instructions\n\nBe brief.\n\nIn French.", "type weather = (_: {\ncity: string,"})
    EXPECT_NE(c[1].content.find(line), std::string::npos) << c[1].content;
  EXPECT_EQ(c[2].content, "Weather in Paris?");
  EXPECT_EQ(c[3].channel, "analysis");
  EXPECT_EQ(c[4], (HarmonyMessage{.role = HarmonyRole::assistant, .channel = "commentary", .content = "Let me see."}));
  EXPECT_EQ(c[5].recipient, "functions.weather");
  EXPECT_EQ(c[5].content, "{\"city\": 1}");
  EXPECT_EQ(c[6], (HarmonyMessage{.role = HarmonyRole::tool,
                                  .name = "functions.weather",
                                  .recipient = "assistant",
                                  .channel = "commentary",
                                  .content = "Rain"}));
  EXPECT_EQ(c[7].channel, "final");
  EXPECT_EQ(c[8].role, HarmonyRole::user);
}

TEST(api_request, items_of_a_response_are_the_same_conversation) {
  const ApiRequest r =
      parse_responses_request(R"({"instructions": "Be brief.", "max_output_tokens": 9, "reasoning": {"effort": "low"},
      "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "3"},
        {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "It is 3.", "annotations": []}]}],
      "tools": [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}]})");
  EXPECT_TRUE(r.chat && r.responses);
  EXPECT_EQ(r.tokens, 9);
  EXPECT_EQ(r.reasoning, "low");
  const std::vector<HarmonyMessage> c = harmony_messages(conversation_of(r));
  ASSERT_EQ(c.size(), 7u);
  EXPECT_NE(c[1].content.find("Be brief."), std::string::npos);
  EXPECT_EQ(c[2].content, "Hi");
  EXPECT_EQ(c[3].channel, "analysis");
  EXPECT_EQ(c[4].recipient, "functions.f");
  EXPECT_EQ(c[5].name, "functions.f");
  EXPECT_EQ(c[6].content, "It is 3.");
  EXPECT_EQ(parse_responses_request(R"({"input": "Hi"})").messages[0].content, "Hi");
}

TEST(api_request, bad_items_are_refused_by_the_field_s_name) {
  for (const auto& [body, param] : std::vector<std::pair<std::string, std::string>>{
           {"{}", "input"},
           {R"({"input": []})", "input"},
           {R"({"input": [{"type": "web_search_call"}]})", "input"},
           {R"({"input": [{"type": "item_reference", "id": "msg_1"}]})", "input[0].type"},
           {R"({"input": [{"type": "compaction", "encrypted_content": "x"}]})", "input[0].type"},
           {R"({"input": "a", "top_logprobs": 21})", "top_logprobs"},
           {R"({"input": "a", "prompt": {"id": "p"}})", "prompt"},
           {R"({"input": [{"type": "function_call", "call_id": "c", "name": "a b", "arguments": ""}]})",
            "input[0].name"},
           {R"({"input": [{"role": "user", "content": [{"type": "input_image"}]}]})", "input[0].content[0].type"},
           {R"({"input": "a", "previous_response_id": "r"})", "previous_response_id"},
           {R"({"input": "a", "text": {"format": {"type": "xml"}}})", "text.format.type"},
           {R"({"input": "a", "text": {"format": {"type": "json_schema", "name": "a"}}})", "text.format.schema"},
           {R"({"input": "a", "n": 2})", "n"}}) {
    try {
      parse_responses_request(body);
      ADD_FAILURE() << body;
    } catch (const ApiError& e) { EXPECT_EQ(e.param, param) << body; }
  }
}

TEST(api_request, a_schema_keeps_the_order_of_its_properties_and_is_in_the_prompt) {
  const std::string schema = R"({"type":"object","properties":{"z":{"type":"null"},"a":{"type":"null"}}})";
  const ApiRequest chat = parse_api_request(
      chat_with(
          R"("response_format": {"type": "json_schema", "json_schema": {"name": "thing", "description": "A thing", "schema": )" +
          schema + "}}"),
      true);
  EXPECT_EQ(chat.format.schema, schema);
  EXPECT_EQ(chat.format.path, "response_format.json_schema.schema");
  const auto conversation = harmony_messages(conversation_of(chat));
  ASSERT_EQ(conversation.size(), 3u);
  EXPECT_EQ(conversation[1].content, "# Response Formats\n\n## thing\n\n// A thing\n" + schema);
  const ApiRequest response = parse_responses_request(
      R"({"input": "a", "text": {"format": {"type": "json_schema", "name": "thing", "strict": true, "schema": )" +
      schema + "}}}");
  EXPECT_EQ(response.format.schema, schema);
  EXPECT_EQ(response.format.path, "text.format.schema");
  const ApiRequest tools = parse_responses_request(
      R"({"input": "a", "tool_choice": {"type": "function", "name": "f"}, "tools": [{"type": "function", "name": "f", "strict": true, "parameters": )" +
      schema + "}]}");
  EXPECT_EQ(tools.tools[0].parameters, schema);
  EXPECT_EQ(tools.forced, "f");
  EXPECT_EQ(tools.strict, std::vector<std::string>{"f"});
}

TEST(api_request, fields_without_effect_are_ignored_and_named_and_null_is_absent) {
  const ApiRequest r = parse_api_request(
      R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}], "id": 1},
        {"role": "assistant", "content": "b", "id": 2, "phase": null, "refusal": null, "function_call": null, "audio": null},
        {"role": "user", "content": "c"}],
      "cache_prompt": true, "temprature": 1, "anything": null, "prompt_cache_retention": "24h", "echo": null,
      "chat_template_kwargs": {"reasoning_effort": "high", "enable_thinking": true, "thinking": 1}, "top_k": -1, "repetition_penalty": 1.0,
      "top_logprobs": 0, "skip_special_tokens": true})",
      true);
  EXPECT_EQ(r.ignored, (std::vector<std::string>{"messages[].id", "chat_template_kwargs.thinking", "cache_prompt",
                                                 "temprature (did you mean temperature?)"}));
  EXPECT_EQ(r.reasoning, "high");
  EXPECT_EQ(r.sampling.top_k, 0);
  EXPECT_EQ(r.messages[1].content, "b");
  EXPECT_TRUE(parse_api_request(chat_with(R"("user": "u", "store": false, "verbosity": "low")"), true).ignored.empty());
}

TEST(api_request, strict_fields_refuse_unknown_fields) {
  const ApiLimits strict = {.strict_fields = true};
  EXPECT_EQ(refusal(completion_with(R"("max_token": 5)"), false, strict),
            "max_token|unknown_parameter|max_token: an unknown field (did you mean max_tokens?)");
  EXPECT_EQ(refusal(chat_with(R"("tools": [{"type": "web_search"}])"), true, strict),
            "tools[0].type||tools[0].type: found 'web_search', expected function");
  EXPECT_EQ(refusal(R"({"messages": [{"role": "user", "content": "a", "x": 1}]})", true, strict).substr(0, 31),
            "messages[0].x|unknown_parameter");
  EXPECT_EQ(refusal(chat_with(R"("anything": null)"), true, strict), "accepted");
}

TEST(api_request, a_field_that_would_change_the_answer_is_refused_unless_it_is_neutral) {
  for (const auto& [field, neutral, other] :
       std::vector<std::array<const char*, 3>>{{"repetition_penalty", "1", "1.1"},
                                               {"min_tokens", "0", "5"},
                                               {"mirostat", "0", "2"},
                                               {"ignore_eos", "false", "true"},
                                               {"add_generation_prompt", "true", "false"},
                                               {"bad_words", "[]", "[\"no\"]"},
                                               {"grammar", "\"\"", "\"root ::= x\""},
                                               {"include_stop_str_in_output", "false", "true"},
                                               {"skip_special_tokens", "true", "false"},
                                               {"n_probs", "0", "3"},
                                               {"thinking_token_budget", "null", "100"},
                                               {"guided_json", "null", "{}"},
                                               {"web_search_options", "null", "{}"}}) {
    const std::string name = std::string("\"") + field + "\": ";
    EXPECT_EQ(refusal(chat_with(name + neutral), true), "accepted") << field;
    EXPECT_EQ(refusal(chat_with(name + other), true), std::string(field) + "|unsupported_parameter|" + field +
                                                          ": this server does not support the field; leave it out");
  }
}

// The beginnings of requests, without the closing brace, and the functions that parse them.
struct Api {
  std::string begin;
  ApiRequest (*parse)(const std::string& body);
};
const Api kCompletions = {R"({"prompt": "a")", [](const std::string&b) { return parse_api_request(b, false); }},
          kChats = {R"({"messages": [{"role": "user", "content": "a"}])",
                    [](const std::string&b) { return parse_api_request(b, true); }},
          kResponses = {R"({"input": "a")", [](const std::string&b) { return parse_responses_request(b); }},
          kMessages = {R"({"max_tokens": 5, "messages": [{"role": "user", "content": "a"}])",
                       [](const std::string&b) { return parse_messages_request(b); }};

TEST(api_request, a_field_of_another_api_is_refused_with_the_name_that_this_api_has) {
  struct Case {
    const Api& api;
    const char *field, *neutral, *other, *own;
  };
  const char json[] = R"({"type": "json_object"})", text[] = R"({"type": "text"})", tool[] = R"([{"name": "f"}])";
  for (const Case& c : std::initializer_list<Case>{
           {kCompletions, "max_completion_tokens", "null", "5", ", expected max_tokens"},
           {kCompletions, "response_format", text, json, ""},
           {kCompletions, "messages", "null", "[]", ", expected prompt"},
           {kCompletions, "tools", "[]", tool, ""},
           {kChats, "max_output_tokens", "null", "5", ", expected max_completion_tokens"},
           {kChats, "text", "{}", R"({"format": {"type": "json_object"}})", ", expected response_format"},
           {kChats, "system", R"("")", R"("Be brief.")", ", expected a message of the role system"},
           {kChats, "stop_sequences", "[]", R"(["a"])", ", expected stop"},
           {kChats, "echo", "false", "true", ""},
           {kChats, "previous_response_id", "null", R"("resp_1")", ""},
           {kResponses, "max_tokens", "null", "5", ", expected max_output_tokens"},
           {kResponses, "response_format", text, json, ", expected text.format"},
           {kResponses, "logprobs", "false", "true", ", expected include"},
           {kMessages, "max_completion_tokens", "null", "5", ", expected max_tokens"},
           {kMessages, "response_format", text, json, ", expected output_config.format"},
           {kMessages, "instructions", R"("")", R"("Be brief.")", ", expected system"},
           {kMessages, "logprobs", "false", "true", ""}}) {
    const std::string begin = c.api.begin + ", \"" + c.field + "\": ";
    EXPECT_TRUE(c.api.parse(begin + c.neutral + "}").ignored.empty()) << c.field;
    try {
      c.api.parse(begin + c.other + "}");
      ADD_FAILURE() << "it was read: " << c.field;
    } catch (const ApiError& e) {
      EXPECT_EQ(std::pair(e.param, e.code), std::pair(std::string(c.field), std::string("unsupported_parameter")));
      EXPECT_EQ(e.what(), std::string(c.field) + ": this address has no such field" + c.own);
    }
  }
}

TEST(api_request, an_answer_may_have_several_calls_unless_the_request_says_no) {
  for (const Api* api : {&kChats, &kResponses}) {
    EXPECT_FALSE(api->parse(api->begin + "}").one_call);
    EXPECT_FALSE(api->parse(api->begin + R"(, "parallel_tool_calls": true})").one_call);
    EXPECT_TRUE(api->parse(api->begin + R"(, "parallel_tool_calls": false})").one_call);
    EXPECT_THROW(api->parse(api->begin + R"(, "parallel_tool_calls": 0})"), ApiError);
  }
  EXPECT_FALSE(kMessages.parse(kMessages.begin + R"(, "tool_choice": {"type": "auto"}})").one_call);
  EXPECT_TRUE(
      kMessages.parse(kMessages.begin + R"(, "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}})")
          .one_call);
}

TEST(api_request, a_response_has_log_probabilities_where_include_or_top_logprobs_asks_for_them) {
  const auto logprobs = [](const std::string& more) {
    return kResponses.parse(kResponses.begin + more + "}").logprobs;
  };
  const std::string asked = R"(, "include": ["reasoning.encrypted_content", "message.output_text.logprobs"])";
  EXPECT_EQ(logprobs(""), -1);
  EXPECT_EQ(logprobs(R"(, "include": ["reasoning.encrypted_content"], "top_logprobs": 0)"), -1);
  EXPECT_EQ(logprobs(asked), 0);
  EXPECT_EQ(logprobs(asked + R"(, "top_logprobs": 3)"), 3);
  EXPECT_EQ(logprobs(R"(, "top_logprobs": 3)"), 3);
  for (const char* bad : {R"(, "include": "message.output_text.logprobs")", R"(, "include": [1])",
                          R"(, "top_logprobs": 21)", R"(, "top_logprobs": true)"})
    EXPECT_THROW(logprobs(bad), ApiError) << bad;
}

TEST(api_request, stop_token_ids_are_a_list_of_ids_in_chats_and_completions) {
  const auto stop_ids = [](const std::string& value, bool chat) {
    const std::string more = "\"stop_token_ids\": " + value;
    return parse_api_request(chat ? chat_with(more) : completion_with(more), chat, {.strict_fields = true}).stop_ids;
  };
  for (const bool chat : {false, true}) {
    EXPECT_EQ(stop_ids("[7, 0, 7]", chat), (std::vector<int32_t>{7, 0, 7}));
    for (const char* none : {"[]", "null"}) EXPECT_EQ(stop_ids(none, chat), std::vector<int32_t>{}) << none;
  }
  std::string many = "0";
  for (int i = 0; i < 64; ++i) many += ", 0";
  for (const auto& [value, expected] : std::vector<std::pair<std::string, std::string>>{
           {"7", "stop_token_ids||stop_token_ids: found number 7, expected a list of token ids"},
           {"\"7\"", "stop_token_ids||stop_token_ids: found string"},
           {"{}", "stop_token_ids||stop_token_ids: found object, expected a list of token ids"},
           {"[7, -1]", "stop_token_ids[1]||stop_token_ids[1]: found number -1, expected an integer from 0 to "},
           {"[1.5]", "stop_token_ids[0]||stop_token_ids[0]: found number 1.5, expected an integer from 0 to "},
           {"[\"a\"]", "stop_token_ids[0]||stop_token_ids[0]: found string"},
           {"[true]", "stop_token_ids[0]||"},
           {"[18446744073709551615]", "stop_token_ids[0]||"},
           {"[" + many + "]", "stop_token_ids||stop_token_ids: found 65 ids, expected at most 64"}}) {
    expect_refusal(chat_with("\"stop_token_ids\": " + value), true, expected);
    expect_refusal(completion_with("\"stop_token_ids\": " + value), false, expected);
  }
  // The other two APIs have no such field.
  const std::string responses = R"({"input": "a", "stop_token_ids": )",
                    messages =
                        R"({"max_tokens": 5, "messages": [{"role": "user", "content": "a"}], "stop_token_ids": )";
  EXPECT_NO_THROW(parse_responses_request(responses + "[]}"));
  EXPECT_NO_THROW(parse_messages_request(messages + "[]}"));
  EXPECT_THROW(parse_responses_request(responses + "[1]}"), ApiError);
  EXPECT_THROW(parse_messages_request(messages + "[1]}"), ApiError);
}

TEST(api_request, a_prediction_is_text_or_parts_of_text) {
  const auto prediction = [](const std::string& value) {
    return parse_api_request(chat_with(R"("prediction": )" + value), true).prediction;
  };
  EXPECT_FALSE(prediction("null").has_value());
  EXPECT_EQ(prediction(R"({"type": "content", "content": ""})"), "");
  EXPECT_EQ(prediction(R"({"type": "content", "content": "int x;"})"), "int x;");
  EXPECT_EQ(
      prediction(
          R"({"type": "content", "content": [{"type": "text", "text": "int "}, {"type": "text", "text": "x;"}]})"),
      "int x;");
  expect_refusal(chat_with(R"("prediction": "int x;")"), true, "prediction||prediction: found ");
  expect_refusal(chat_with(R"("prediction": {"type": "tokens", "content": "a"})"), true,
                 "prediction.type||prediction.type: found 'tokens', expected content");
  expect_refusal(chat_with(R"("prediction": {"type": "content"})"), true, "prediction.content|");
}

TEST(api_request, an_effort_is_read_wherever_clients_write_it) {
  const auto effort = [](const std::string& more) { return parse_api_request(chat_with(more), true).reasoning; };
  EXPECT_EQ(effort(""), "");
  EXPECT_EQ(effort(R"("reasoning_effort": "none")"), "none");
  EXPECT_EQ(effort(R"("reasoning_effort": "minimal")"), "minimal");
  EXPECT_EQ(effort(R"("reasoning_effort": "xhigh")"), "xhigh");
  EXPECT_EQ(effort(R"("reasoning": {"effort": "medium"})"), "medium");
  EXPECT_EQ(effort(R"("reasoning": {"effort": "low"}, "chat_template_kwargs": {"reasoning_effort": "high"})"), "low");
  EXPECT_EQ(effort(R"("reasoning_effort": "high", "reasoning": {"effort": "low"})"), "high");
  EXPECT_EQ(parse_responses_request(R"({"input": "a", "reasoning": {"effort": "xhigh"}})").reasoning, "xhigh");
  // As clients of Qwen's models write it.
  EXPECT_EQ(effort(R"("chat_template_kwargs": {"enable_thinking": false})"), "none");
  EXPECT_EQ(effort(R"("enable_thinking": false)"), "none");
  EXPECT_EQ(effort(R"("chat_template_kwargs": {"enable_thinking": true})"), "");
  EXPECT_EQ(effort(R"("reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": false})"), "high");
  EXPECT_EQ(effort(R"("reasoning": {"enabled": false})"), "none");
  EXPECT_EQ(effort(R"("reasoning": {"enabled": true})"), "");
  EXPECT_EQ(effort(R"("reasoning": {"enabled": false, "effort": "low"})"), "low");
  EXPECT_EQ(effort(R"("reasoning": {"effort": "low", "exclude": true})"), "low");
  // As clients of DeepSeek's, GLM's and Kimi's models write it.
  EXPECT_EQ(effort(R"("thinking": {"type": "disabled"})"), "none");
  EXPECT_EQ(effort(R"("thinking": {"type": "enabled"})"), "");
  expect_refusal(chat_with(R"("thinking": {"type": "no"})"), true, "thinking.type|");
  expect_refusal(chat_with(R"("chat_template_kwargs": {"enable_thinking": "no"})"), true,
                 "chat_template_kwargs.enable_thinking|");
}

TEST(api_request, tools_that_are_no_functions_are_left_out) {
  const ApiRequest r = parse_responses_request(
      R"({"input": "a", "tools": [{"type": "web_search"}, {"type": "function", "name": "shell", "strict": false,
        "parameters": {"type": "object", "properties": {}}}, {"type": "custom", "name": "apply_patch"},
        {"type": "namespace", "name": "mcp", "tools": []}], "tool_choice": "auto"})");
  ASSERT_EQ(r.tools.size(), 1u);
  EXPECT_EQ(r.tools[0].name, "shell");
  EXPECT_EQ(r.tools[0].parameters, R"({"type":"object","properties":{}})");
  EXPECT_EQ(r.ignored, (std::vector<std::string>{"tools[] of type web_search", "tools[] of type custom",
                                                 "tools[] of type namespace"}));
  EXPECT_TRUE(
      parse_api_request(chat_with(R"("tools": [{"type": "custom", "custom": {"name": "a"}}])"), true).tools.empty());
}

TEST(api_request, calls_of_other_tools_are_shown_to_the_model_as_calls_of_functions) {
  const ApiRequest r = parse_responses_request(R"({"input": [{"role": "user", "content": "Hi"},
      {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** \"Begin\"", "status": "completed"},
      {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
      {"type": "local_shell_call", "id": "ls", "call_id": "c2", "action": {"type": "exec", "command": ["ls"]}},
      {"type": "local_shell_call_output", "call_id": "c2", "output": "a.txt"},
      {"type": "web_search_call", "id": "ws_1", "status": "completed"}]})");
  ASSERT_EQ(r.messages.size(), 5u);
  EXPECT_EQ(r.messages[1].calls[0].name, "apply_patch");
  EXPECT_EQ(r.messages[1].calls[0].arguments, R"({"input":"*** \"Begin\""})");
  EXPECT_EQ(r.messages[2].content, "done");
  EXPECT_EQ(r.messages[3].calls[0].name, "local_shell");
  EXPECT_EQ(r.messages[3].calls[0].arguments, R"({"command":["ls"],"type":"exec"})");
  EXPECT_EQ(r.ignored, std::vector<std::string>{"input[] of type web_search_call"});
  EXPECT_EQ(conversation_of(r).messages.back().function, "local_shell");
  const ApiRequest chat = parse_api_request(
      R"({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": null,
        "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "run", "input": "ls"}}]}]})",
      true);
  EXPECT_EQ(chat.messages[1].calls[0].arguments, R"({"input":"ls"})");
}

TEST(api_request, items_of_newer_clients_are_read) {
  const ApiRequest r = parse_responses_request(R"({"input": [
      {"id": null, "type": "message", "role": "user", "status": null, "phase": null, "content": [{"type": "input_text", "text": "Hi", "prompt_cache_breakpoint": null}]},
      {"id": "rs", "type": "reasoning", "summary": [], "content": null, "encrypted_content": null, "status": null},
      {"id": "msg", "type": "message", "role": "assistant", "status": "completed", "phase": "final_answer",
       "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": null}]},
      {"id": "fc", "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": null, "caller": null},
      {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]}],
    "top_logprobs": null, "moderation": null, "context_management": null, "client_metadata": {"a": "b"}, "truncation": "auto",
    "max_tool_calls": 5, "include": ["reasoning.encrypted_content"]})");
  EXPECT_EQ(r.messages.size(), 5u);
  EXPECT_EQ(r.messages[4].content, "x");
  EXPECT_TRUE(r.ignored.empty());
}

TEST(api_request, a_response_repeats_the_fields_of_its_request) {
  const auto repeated = [](const std::string& more) {
    return parse_json(parse_responses_request("{\"input\": \"a\"" + more + "}").repeated, "repeated");
  };
  EXPECT_EQ(
      repeated(""),
      parse_json(R"({"background": false, "frequency_penalty": 0.0, "instructions": null, "max_output_tokens": null,
      "max_tool_calls": null, "metadata": {}, "parallel_tool_calls": true, "presence_penalty": 0.0,
      "previous_response_id": null, "prompt_cache_key": null, "reasoning": {"effort": null, "summary": null},
      "safety_identifier": null, "service_tier": "default", "store": false, "temperature": 1.0,
      "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_logprobs": 0, "top_p": 1,
      "truncation": "disabled"})",
                 "expected"));
  const Json all = repeated(
      R"(, "instructions": "Be brief.", "max_output_tokens": 5, "metadata": {"a": "b"}, "parallel_tool_calls": false,
      "reasoning": {"effort": "xhigh"}, "temperature": 0.5, "top_p": 0.9, "top_logprobs": 2, "presence_penalty": 1, "prompt_cache_key": "k",
      "safety_identifier": "s", "max_tool_calls": 3, "service_tier": "flex", "text": {"verbosity": "low", "format": null}, "tool_choice": "none",
      "tools": [{"type": "web_search"}, {"type": "function", "name": "f", "parameters": {"type": "object"}}], "store": true)");
  EXPECT_EQ(all["instructions"], "Be brief.");
  EXPECT_EQ(all["max_output_tokens"], 5);
  EXPECT_EQ(all["metadata"], (Json{{"a", "b"}}));
  EXPECT_EQ(all["parallel_tool_calls"], false);
  EXPECT_EQ(all["reasoning"]["effort"], "xhigh");
  EXPECT_EQ(all["temperature"], 0.5);
  EXPECT_EQ(all["top_p"], 0.9);
  EXPECT_EQ(all["top_logprobs"], 2);
  EXPECT_EQ(all["presence_penalty"], 1);
  EXPECT_EQ(all["prompt_cache_key"], "k");
  EXPECT_EQ(all["safety_identifier"], "s");
  EXPECT_EQ(all["max_tool_calls"], 3);
  EXPECT_EQ(all["service_tier"], "default");  // the only tier
  EXPECT_EQ(all["text"], parse_json(R"({"verbosity": "low", "format": {"type": "text"}})", "expected"));
  EXPECT_EQ(all["tool_choice"], "none");
  EXPECT_EQ(all["tools"],
            parse_json(R"([{"type": "function", "name": "f", "parameters": {"type": "object"}}])", "expected"));
  EXPECT_EQ(all["store"], false);
}

TEST(api_request, a_result_without_its_call_is_refused) {
  const ApiRequest r =
      parse_api_request(R"({"messages": [{"role": "tool", "tool_call_id": "c9", "content": "x"}]})", true);
  try {
    conversation_of(r);
    FAIL();
  } catch (const ApiError& e) { EXPECT_EQ(e.param, "messages[0].tool_call_id"); }
  try {
    conversation_of(parse_responses_request(
        R"({"instructions": "i", "input": [{"type": "function_call_output", "call_id": "c", "output": "x"}]})"));
    FAIL();
  } catch (const ApiError& e) { EXPECT_EQ(e.param, "input[0].call_id"); }
}

TEST(api_request, errors_are_openai_s_object) {
  EXPECT_EQ(to_json(ApiError(400, "a \"b\"", "n", "c")),
            R"({"error":{"message":"a \"b\"","type":"invalid_request_error","param":"n","code":"c"}})");
  EXPECT_EQ(to_json(ApiError(429, "full")),
            R"({"error":{"message":"full","type":"rate_limit_error","param":null,"code":null}})");
  EXPECT_STREQ(ApiError(401, "").type(), "authentication_error");
  EXPECT_STREQ(ApiError(503, "").type(), "server_error");
}

}  // namespace
}  // namespace ingot
