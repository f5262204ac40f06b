#include "ingot/engines/serve/messages.h"

#include <gtest/gtest.h>

#include "ingot/engines/serve/api_request.h"
#include "ingot/io/json.h"

namespace ingot {
namespace {

std::vector<Json> events_of(const std::string& text) {
  std::vector<Json> events;
  for (size_t at = 0; at < text.size();) {
    const size_t data = text.find("\ndata: ", at), end = text.find("\n\n", at);
    events.push_back(parse_json(text.substr(data + 7, end - data - 7), "event"));
    EXPECT_EQ(text.substr(at, data - at), "event: " + events.back()["type"].get<std::string>());
    at = end + 2;
  }
  return events;
}

// The object that Anthropic's clients build from the events.
Json built(const std::vector<Json>& events) {
  Json message = events.at(0)["message"];
  for (const Json& e : events) {
    const std::string type = e["type"];
    if (type == "content_block_start") {
      EXPECT_EQ(e["index"], message["content"].size());
      message["content"].push_back(e["content_block"]);
      message["content"].back()["partial"] = "";
    } else if (type == "content_block_delta") {
      Json& block = message["content"][e["index"].get<size_t>()];
      const Json& d = e["delta"];
      for (const auto& [delta, key] : {std::pair("text_delta", "text"), {"thinking_delta", "thinking"}})
        if (d["type"] == delta) block[key] = block[key].get<std::string>() + d[key].get<std::string>();
      if (d["type"] == "input_json_delta")
        block["partial"] = block["partial"].get<std::string>() + d["partial_json"].get<std::string>();
    } else if (type == "content_block_stop") {
      Json& block = message["content"][e["index"].get<size_t>()];
      if (block["type"] == "tool_use" && block["partial"] != "")
        block["input"] = parse_json(block["partial"].get<std::string>(), "input");
      block.erase("partial");
    } else if (type == "message_delta") {
      message.update(e["delta"]);
      message["usage"].update(e["usage"]);
    }
  }
  EXPECT_EQ(events.back()["type"], "message_stop");
  return message;
}

TEST(messages, events_build_the_whole_message) {
  for (const bool thoughts : {true, false}) {
    MessageWriter w("msg_x", "m", 7, thoughts);
    std::string text = w.begin();
    for (const AnswerPiece& p :
         std::vector<AnswerPiece>{{.reasoning = "H"}, {.reasoning = "m"}, {.text = "Ye"}, {.text = "s"}})
      text += w.add(p);
    text += w.add({.calls = {{.index = 0, .name = "f", .arguments = "{\"a\""}}});
    text += w.add({.calls = {{.index = 0, .arguments = ": 1}"}}});
    text += w.add({.calls = {{.index = 1, .name = "g", .arguments = ""}}});
    text += w.end({.usage = {.prompt = 7, .cached = 2, .tokens = 9, .thought_tokens = 2}});
    const Json whole = parse_json(w.whole(), "whole");
    EXPECT_EQ(built(events_of(text)), whole);
    const size_t first = thoughts ? 1 : 0;
    ASSERT_EQ(whole["content"].size(), first + 3);
    if (thoughts) {
      EXPECT_EQ(whole["content"][0], (Json{{"type", "thinking"}, {"thinking", "Hm"}, {"signature", ""}}));
    }
    EXPECT_EQ(whole["content"][first]["text"], "Yes");
    EXPECT_EQ(whole["content"][first + 1]["input"], (Json{{"a", 1}}));
    EXPECT_EQ(whole["content"][first + 2]["name"], "g");
    EXPECT_EQ(whole["content"][first + 2]["input"], Json::object());
    EXPECT_NE(whole["content"][first + 1]["id"], whole["content"][first + 2]["id"]);
    EXPECT_EQ(whole["stop_reason"], "tool_use");
    EXPECT_EQ(whole["usage"]["input_tokens"], 5);
    EXPECT_EQ(whole["usage"]["cache_read_input_tokens"], 2);
    EXPECT_EQ(whole["usage"]["output_tokens"], 9);
  }
}

TEST(messages, a_message_states_why_it_ended) {
  const auto end = [](const AnswerPiece& piece, const AnswerEnd& how) {
    MessageWriter w("msg_x", "m", 1, true);
    w.begin();
    w.add(piece);
    w.end(how);
    const Json whole = parse_json(w.whole(), "whole");
    return whole["stop_reason"].get<std::string>() + "|" + whole["stop_sequence"].dump();
  };
  EXPECT_EQ(end({.text = "a"}, {}), "end_turn|null");
  EXPECT_EQ(end({.text = "a"}, {.cut = true}), "max_tokens|null");
  EXPECT_EQ(end({.text = "a"}, {.stop_string = "END"}), "stop_sequence|\"END\"");
  EXPECT_EQ(end({.calls = {{.index = 0, .name = "f", .arguments = "{\"a"}}}, {.cut = true}), "max_tokens|null");
}

TEST(messages, arguments_that_are_no_object_are_put_into_an_object) {
  MessageWriter w("msg_x", "m", 1, true);
  w.begin();
  w.add({.calls = {{.index = 0, .name = "f", .arguments = "[1, 2"}}});
  w.end({});
  EXPECT_EQ(parse_json(w.whole(), "whole")["content"][0]["input"], (Json{{"arguments", "[1, 2"}}));
}

TEST(messages, an_answer_with_a_call_stops_for_the_tool_whatever_comes_after_the_call) {
  MessageWriter w("msg_x", "m", 1, true);
  w.begin();
  w.add({.calls = {{.index = 0, .name = "f", .arguments = "{}"}}});
  w.add({.text = "I have called f."});
  w.end({});
  const Json whole = parse_json(w.whole(), "whole");
  EXPECT_EQ(whole["stop_reason"], "tool_use");
  EXPECT_EQ(whole["content"].size(), 2u);
}

TEST(messages, errors_have_anthropic_s_form) {
  for (const auto& [status, type] : std::vector<std::pair<int, std::string>>{{400, "invalid_request_error"},
                                                                             {401, "authentication_error"},
                                                                             {403, "permission_error"},
                                                                             {404, "not_found_error"},
                                                                             {413, "request_too_large"},
                                                                             {429, "rate_limit_error"},
                                                                             {500, "api_error"},
                                                                             {503, "overloaded_error"}}) {
    const Json e = parse_json(to_messages_json(ApiError(status, "no", "field")), "error");
    EXPECT_EQ(e, (Json{{"type", "error"}, {"error", {{"type", type}, {"message", "no"}}}}));
  }
  EXPECT_LT(to_messages_json(ApiError(400, std::string(1000000, 'k'))).size(), 2000u);
  MessageWriter w("msg_x", "m", 1, true);
  EXPECT_EQ(events_of(w.fail(ApiError(500, "no")))[0]["error"]["type"], "api_error");
}

TEST(messages_request, blocks_become_the_same_conversation_as_with_the_other_apis) {
  const ApiRequest r = parse_messages_request(R"({"model": "m", "max_tokens": 9, "stop_sequences": ["X"],
      "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
      "messages": [{"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Ask.", "signature": "s"},
          {"type": "text", "text": "Let me see."}, {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}]},
        {"role": "user", "content": [{"type": "text", "text": "Quick!"},
          {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "Rain"}], "is_error": true}]}],
      "tools": [{"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": {"z": {}, "a": {}}}},
        {"type": "web_search_20250305", "name": "web_search"}],
      "tool_choice": {"type": "tool", "name": "weather"}, "metadata": {"user_id": "u"}})");
  EXPECT_EQ(r.ignored, std::vector<std::string>{"tools[] of type web_search_20250305"});
  EXPECT_TRUE(r.chat && r.messages_api && !r.shows_thoughts);
  EXPECT_EQ(r.tokens, 9);
  EXPECT_EQ(r.stop, std::vector<std::string>{"X"});
  EXPECT_EQ(r.forced, "weather");
  ASSERT_EQ(r.tools.size(), 1u);
  EXPECT_EQ(r.tools[0].parameters, R"({"type":"object","properties":{"z":{},"a":{}}})");
  const std::vector<ChatMessage> want = {
      {.role = ChatRole::instructions, .content = "Be brief."},
      {.role = ChatRole::user, .content = "Weather?"},
      {.role = ChatRole::assistant,
       .content = "Let me see.",
       .thoughts = "Ask.",
       .calls = {{.id = "t1", .name = "weather", .arguments = R"({"city":"Paris"})"}}},
      {.role = ChatRole::result, .content = "Error: Rain", .function = "weather", .call_id = "t1"},
      {.role = ChatRole::user, .content = "Quick!"}};
  EXPECT_EQ(conversation_of(r).messages, want);
}

TEST(messages_request, a_tool_s_name_may_have_128_characters) {
  const auto named = [](size_t length) {
    return parse_messages_request(R"({"messages": [{"role": "user", "content": "a"}], "tools": [{"name": ")" +
                                  std::string(length, 'x') + R"("}]})");
  };
  EXPECT_EQ(named(128).tools.at(0).name.size(), 128u);
  EXPECT_THROW(named(129), ApiError);
}

TEST(messages_request, thinking_and_effort_are_read) {
  const auto effort = [](const std::string& more) {
    const ApiRequest r =
        parse_messages_request(R"({"max_tokens": 9, "messages": [{"role": "user", "content": "a"}])" + more + "}");
    return r.reasoning + (r.shows_thoughts ? "+" : "");
  };
  EXPECT_EQ(effort(""), "");
  EXPECT_EQ(effort(R"(, "thinking": {"type": "disabled"})"), "none");
  EXPECT_EQ(effort(R"(, "thinking": {"type": "enabled", "budget_tokens": 1024})"), "low+");
  EXPECT_EQ(effort(R"(, "thinking": {"type": "enabled", "budget_tokens": 10000})"), "medium+");
  EXPECT_EQ(effort(R"(, "thinking": {"type": "adaptive"}, "output_config": {"effort": "max"})"), "max+");
}

TEST(messages_request, unsupported_fields_are_refused_by_name) {
  const std::string turns = R"("messages": [{"role": "user", "content": "a"}])";
  for (
      const auto& [body, param] : std::vector<std::pair<std::string, std::string>>{
          {"{}", "messages"},
          {R"({"messages": []})", "messages"},
          {R"({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]})",
           "messages[0].content[0].type"},
          {R"({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]}]})",
           "messages[0].content[0].type"},
          {R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})", "messages[1]"},
          {"{" + turns + R"(, "tool_choice": {"type": "any"}})", "tool_choice"},
          {"{" + turns + R"(, "tool_choice": {"type": "tool", "name": "f"}})", "tool_choice.name"},
          {"{" + turns + R"(, "stop_sequences": [""]})", "stop_sequences[0]"},
          {"{" + turns + R"(, "tools": [{"name": "a b"}]})", "tools[0].name"},
          {"{" + turns + R"(, "mcp_servers": [{"type": "url"}]})", "mcp_servers"}})
    try {
      parse_messages_request(body);
      ADD_FAILURE() << "it was read: " << body;
    } catch (const ApiError& e) { EXPECT_EQ(e.param, param) << body; }
  const ApiRequest lost = parse_messages_request(
      R"({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"}]}]})");
  try {
    conversation_of(lost);
    ADD_FAILURE() << "it was read";
  } catch (const ApiError& e) { EXPECT_EQ(e.param, "messages[0].content[0].tool_use_id"); }
}

}  // namespace
}  // namespace ingot
