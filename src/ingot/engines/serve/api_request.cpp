// Parses POST /v1/chat/completions and /v1/completions, and makes the conversation of any chat request.
#include "ingot/engines/serve/api_request.h"

#include <unordered_map>

#include "ingot/engines/serve/request_body.h"

namespace ingot {
namespace request_body {
namespace {

ApiCall call_of(const Json& json, const std::string& path, Reading& reading) {
  Object call(json, path, reading);
  ApiCall c{.id = call.text("id")};
  call.ignore({"index"});
  const std::string type = call.text("type", "function");
  if (type != "function" && type != "custom")
    refuse(call.path("type"), "found '", type.substr(0, 40), "', expected function or custom");
  Object called = call.object(type.c_str());
  c.name = called.require_text("name");
  check_name(c.name, called.path("name"));
  c.arguments = type == "function" ? called.text("arguments", "{}") : arguments_of_text(called.text("input"));
  called.finish();
  call.finish();
  return c;
}

ApiMessage message_of(const Json& json, const std::string& path, Reading& reading) {
  Object object(json, path, reading);
  ApiMessage m{.path = path};
  object.require("role");
  m.role = object.choice("role", {"user", "system", "developer", "assistant", "tool"});
  const Json* content = object.find("content");
  const Json* refusal = object.find("refusal");  // text that the assistant wrote in place of an answer
  if (content == nullptr) content = refusal;
  m.content = content_of(content, object.path("content"), reading);
  object.ignore({"name", "annotations"});
  object.unsupported("audio", nullptr);
  object.unsupported("function_call", nullptr);
  const std::string reasoning = object.text("reasoning");
  m.reasoning = object.text("reasoning_content", reasoning);
  if (const Json* calls = object.find("tool_calls")) {
    if (!calls->is_array() || (m.role != "assistant" && !calls->empty()))
      refuse(object.path("tool_calls"), "found it in a message by ", m.role, ", expected a list in one by assistant");
    for (size_t i = 0; i < calls->size(); ++i)
      m.calls.push_back(call_of((*calls)[i], element(object.path("tool_calls"), i), reading));
  }
  m.call_id = object.text("tool_call_id");
  object.finish();
  if (m.role == "tool" && m.call_id.empty()) refuse(object.path("tool_call_id"), "it is missing");
  if (content == nullptr && m.role != "assistant") refuse(object.path("content"), "it is missing");
  if (content == nullptr && m.calls.empty() && m.reasoning.empty())
    refuse(object.path("content"), "found none, and no tool_calls, expected one of them");
  return m;
}

void read_response_format(Object& body, const Source& source, ApiRequest& r) {
  const Json* json = body.find("response_format");
  if (json == nullptr) return;
  Object format(*json, "response_format", body.reading());
  std::optional<Object> schema;
  if (is_schema_format(*json)) {
    format.find("type");
    schema.emplace(format.object("json_schema"));
  }
  read_format(format, schema ? &*schema : nullptr, source, {"response_format", "json_schema"}, r);
  format.finish();
}

void read_prediction(Object& body, ApiRequest& r) {
  if (body.find("prediction") == nullptr) return;
  Object prediction = body.object("prediction");
  if (const std::string type = prediction.require_text("type"); type != "content")
    refuse("prediction.type", "found '", type.substr(0, 40), "', expected content");
  r.prediction = content_of(&prediction.require("content"), prediction.path("content"), body.reading());
  prediction.finish();
}

}  // namespace

void read_chat(Object& body, const Source& source, ApiRequest& r, const ApiLimits& limits) {
  const Json& messages = body.require("messages");
  if (!messages.is_array() || messages.empty()) refuse_value("messages", messages, "a list of at least one message");
  for (size_t i = 0; i < messages.size(); ++i)
    r.messages.push_back(message_of(messages[i], element("messages", i), body.reading()));
  read_tools(body, source, r, limits);
  read_tool_choice(body, r);
  read_response_format(body, source, r);
  r.shows_thoughts = body.flag("include_reasoning", true);
  read_effort(body, r);
  if (body.flag("logprobs")) r.logprobs = 0;
  if (const auto top = body.integer("top_logprobs", 0, limits.logprobs)) {
    if (r.logprobs < 0 && *top > 0)
      refuse("top_logprobs", "found ", *top, " without logprobs, expected logprobs: true");
    if (r.logprobs >= 0) r.logprobs = *top;
  }
  const auto newer = body.integer("max_completion_tokens", 1, INT32_MAX);
  const auto older = body.integer("max_tokens", 1, INT32_MAX);
  if (newer || older) r.tokens = newer ? *newer : *older;
  body.unsupported("functions", Json::array());
  body.unsupported("function_call", "none");
  body.unsupported("modalities", Json::array({"text"}));
  body.unsupported("audio", nullptr);
  body.unsupported("web_search_options", nullptr);
  read_prediction(body, r);
  body.ignore({"verbosity"});
}

namespace {

constexpr const char* kStopIds = "stop_token_ids";  // as in vLLM and SGLang

std::vector<int32_t> stop_ids_of(const Json& list, const ApiLimits& limits) {
  if (!list.is_array()) refuse_value(kStopIds, list, "a list of token ids");
  if (int64_t(list.size()) > limits.stop_ids)
    refuse(kStopIds, "found ", list.size(), " ids, expected at most ", limits.stop_ids);
  return list.empty() ? std::vector<int32_t>() : ids_of(list, kStopIds);
}

// A string, strings, ids, or lists of ids.
std::vector<ApiPrompt> prompts_of(const Json& prompt, const ApiLimits& limits) {
  if (prompt.is_string()) return {{.text = prompt.get<std::string>()}};
  if (!prompt.is_array() || prompt.empty())
    refuse_value("prompt", prompt, "a string, strings, token ids or lists of token ids");
  if (prompt[0].is_number()) return {{.ids = ids_of(prompt, "prompt")}};
  if (int64_t(prompt.size()) > limits.choices)
    refuse("prompt", "found ", prompt.size(), " prompts, expected at most ", limits.choices);
  std::vector<ApiPrompt> prompts;
  for (size_t i = 0; i < prompt.size(); ++i) {
    const std::string path = element("prompt", i);
    if (prompt[i].is_string())
      prompts.push_back({.text = prompt[i].get<std::string>()});
    else if (prompt[i].is_array())
      prompts.push_back({.ids = ids_of(prompt[i], path)});
    else
      refuse_value(path, prompt[i], "a string or a list of token ids");
  }
  return prompts;
}

void read_completion(Object& body, ApiRequest& r, const ApiLimits& limits) {
  r.prompts = prompts_of(body.require("prompt"), limits);
  if (const auto logprobs = body.integer("logprobs", 0, limits.logprobs)) r.logprobs = *logprobs;
  r.echo = body.flag("echo");
  r.tokens = body.integer("max_tokens", r.echo ? 0 : 1, INT32_MAX).value_or(16);
  body.unsupported("suffix", "");
  if (const auto best = body.integer("best_of", 1, limits.choices); best && *best != 1)
    throw ApiError(400, "best_of: it is not supported, expected 1", "best_of", "unsupported_parameter");
}

}  // namespace
}  // namespace request_body

using namespace request_body;

std::string to_json(const ApiError& e) {
  const auto or_null = [](const std::string& s) { return s.empty() ? OrderedJson() : OrderedJson(s); };
  // The message may contain names from the client, which may be as long as the request.
  const auto most = [](const std::string& s, size_t n) { return s.size() > n ? s.substr(0, n) + "..." : s; };
  OrderedJson error;
  error["message"] = most(e.what(), 800);
  error["type"] = e.type();
  error["param"] = or_null(most(e.param, 200));
  error["code"] = or_null(e.code);
  return show_json(OrderedJson{{"error", error}});
}

ApiRequest parse_api_request(std::string_view text, bool chat, const ApiLimits& limits) {
  const Json json = parse_body(text, limits);
  ApiRequest r{.chat = chat};
  Reading reading{.strict = limits.strict_fields};
  Object body(json, "", reading);
  read_common(body, r, limits);
  if (const Json* ids = body.find(kStopIds)) r.stop_ids = stop_ids_of(*ids, limits);
  if (chat)
    read_chat(body, Source(text), r, limits);
  else
    read_completion(body, r, limits);
  refuse_fields_of_other_apis(body, r);
  body.finish();
  r.ignored = std::move(reading.ignored);
  if (int64_t(r.prompts.size()) * r.n > limits.choices)
    refuse("n", "found ", r.n, " of ", r.prompts.size(), " prompts, expected at most ", limits.choices, " choices");
  return r;
}

namespace {

// The names of all earlier calls by call id; a later call with the same id replaces the earlier one.
using CalledNames = std::unordered_map<std::string, std::string>;

std::string called_function(const CalledNames& names, const ApiRequest& r, const ApiMessage& result) {
  if (const auto at = names.find(result.call_id); at != names.end()) return at->second;
  refuse(result.path + (r.responses      ? ".call_id"
                        : r.messages_api ? ".tool_use_id"
                                         : ".tool_call_id"),
         "found no call of that id in the messages before it");
}

}  // namespace

ChatConversation conversation_of(const ApiRequest& r) {
  ChatConversation out{.functions = r.tools, .effort = r.reasoning};
  if (r.format.kind == ApiFormat::Kind::schema) {
    out.answer_name = r.format.name;
    out.answer_description = r.format.description;
    out.answer_schema = r.format.schema;
  }
  CalledNames names;
  for (const ApiMessage& m : r.messages) {
    for (const ApiCall& c : m.calls) names[c.id] = c.name;
    if (m.role == "system" || m.role == "developer")
      out.messages.push_back({.role = ChatRole::instructions, .content = m.content});
    else if (m.role == "user")
      out.messages.push_back({.role = ChatRole::user, .content = m.content});
    else if (m.role == "assistant")
      out.messages.push_back(
          {.role = ChatRole::assistant, .content = m.content, .thoughts = m.reasoning, .calls = m.calls});
    else
      out.messages.push_back({.role = ChatRole::result,
                              .content = m.content,
                              .function = called_function(names, r, m),
                              .call_id = m.call_id});
  }
  return out;
}

}  // namespace ingot
