// Parses POST /v1/responses.
#include "ingot/engines/serve/request_body.h"

namespace ingot {

using namespace request_body;

namespace {

// Reads calls of tools that are not functions, and the results of these calls. Such items come from a conversation that
// the client had with another model. A call without call_id was executed by the other model's server, and its result is
// not a separate item.
std::optional<ApiMessage> other_item_of(Object& item, const std::string& type, ApiMessage m) {
  for (const char* stored : {"item_reference", "compaction", "compaction_summary"})
    if (type == stored)
      throw ApiError(400, item.path("type") + ": found '" + type + "', expected items whose text is in the request",
                     item.path("type"), "unsupported_parameter");
  const bool known = item.find("call_id") != nullptr;
  if (known && type.ends_with("_call_output")) {
    m.role = "tool";
    m.call_id = item.require_text("call_id");
    const Json& output = item.require("output");
    const bool text = output.is_string() || output.is_array();
    m.content = text ? content_of(&output, item.path("output"), item.reading()) : write_json(output);
    return m;
  }
  if (known && type.ends_with("_call")) {
    ApiCall c{.id = item.require_text("call_id"), .name = item.text("name", type.substr(0, type.size() - 5))};
    check_name(c.name, item.path("name"));
    const Json* action = item.find(type == "apply_patch_call" ? "operation" : "action");
    c.arguments = action != nullptr ? write_json(*action) : arguments_of_text(item.text("input"));
    m.calls.push_back(std::move(c));
    return m;
  }
  item.reading().ignore("input[] of type " + type.substr(0, 40));
  return {};
}

// Reads one item of a conversation. Thoughts and calls are separate items here; the model sees them as one turn of the
// assistant.
std::optional<ApiMessage> item_of(const Json& json, const std::string& path, Reading& reading) {
  Object item(json, path, reading);
  const std::string type = item.text("type", "message");
  item.ignore({"id", "status", "phase"});
  ApiMessage m{.role = "assistant", .path = path};
  if (type == "message") {
    item.require("role");
    m.role = item.choice("role", {"user", "system", "developer", "assistant"});
    m.content = content_of(&item.require("content"), item.path("content"), reading);
  } else if (type == "reasoning") {
    item.ignore({"summary", "encrypted_content"});
    m.reasoning = content_of(item.find("content"), item.path("content"), reading);
  } else if (type == "function_call") {
    m.calls.push_back({.id = item.require_text("call_id"),
                       .name = item.require_text("name"),
                       .arguments = item.require_text("arguments")});
    check_name(m.calls[0].name, item.path("name"));
  } else if (type == "function_call_output") {
    m.role = "tool";
    m.call_id = item.require_text("call_id");
    m.content = content_of(&item.require("output"), item.path("output"), reading);
  } else if (reading.strict) {
    refuse(item.path("type"), "found '", type.substr(0, 40),
           "', expected message, reasoning, function_call or function_call_output");
  } else {
    return other_item_of(item, type, std::move(m));
  }
  item.finish();
  return m;
}

void read_input(Object& body, ApiRequest& r) {
  if (const std::string text = body.text("instructions"); !text.empty())
    r.messages.push_back({.role = "system", .content = text, .path = "instructions"});
  const Json& input = body.require("input");
  if (input.is_string()) {
    r.messages.push_back({.role = "user", .content = input.get<std::string>(), .path = "input"});
    return;
  }
  if (!input.is_array() || input.empty()) refuse_value("input", input, "a string or a list of items");
  const size_t before = r.messages.size();
  for (size_t i = 0; i < input.size(); ++i)
    if (auto message = item_of(input[i], element("input", i), body.reading()))
      r.messages.push_back(std::move(*message));
  if (r.messages.size() == before) refuse("input", "found no item that can be read, expected at least one message");
}

// Other values of `include` have no effect. They name parts of a response that only tools of OpenAI's servers add, or
// the encrypted content of reasoning, which this server's response contains as text.
void read_response_logprobs(Object& body, ApiRequest& r, const ApiLimits& limits) {
  if (const Json* include = body.find("include")) {
    if (!include->is_array()) refuse_value("include", *include, "a list of strings");
    for (size_t i = 0; i < include->size(); ++i) {
      if (!(*include)[i].is_string()) refuse_value(element("include", i), (*include)[i], "a string");
      if ((*include)[i] == "message.output_text.logprobs") r.logprobs = 0;
    }
  }
  if (const auto top = body.integer("top_logprobs", 0, limits.logprobs); top && (*top > 0 || r.logprobs == 0))
    r.logprobs = *top;
}

void read_responses(Object& body, const Source& source, ApiRequest& r, const ApiLimits& limits) {
  read_input(body, r);
  if (r.n != 1) refuse("n", "found ", r.n, ", expected 1");
  if (const auto tokens = body.integer("max_output_tokens", 1, INT32_MAX)) r.tokens = *tokens;
  read_effort(body, r);
  if (const Json* text = body.find("text")) {
    Object object(*text, "text", body.reading());
    if (const Json* json = object.find("format")) {
      Object format = object.object("format");
      const bool schema = is_schema_format(*json);
      if (schema) format.find("type");
      read_format(format, schema ? &format : nullptr, source, {"text", "format"}, r);
      format.finish();
    }
    object.ignore({"verbosity"});
    object.finish();
  }
  read_tools(body, source, r, limits);
  read_tool_choice(body, r);
  body.unsupported("previous_response_id", nullptr);
  body.unsupported("conversation", nullptr);
  body.unsupported("prompt", nullptr);
  body.unsupported("background", false);
  body.unsupported("stop_token_ids", Json::array());
  read_response_logprobs(body, r, limits);
  // Both fields have no effect here: truncation does not shorten a conversation that fits, and max_tool_calls counts
  // only calls that a server executes itself.
  body.ignore({"truncation", "max_tool_calls"});
}

// The fields of a request that its response repeats, with the values that were used.
std::string repeated_fields(const OrderedJson& body, const ApiRequest& r) {
  const auto given = [&](const char* key, const OrderedJson& otherwise) {
    const auto at = body.find(key);
    return at == body.end() || at->is_null() ? otherwise : *at;
  };
  OrderedJson tools = OrderedJson::array();
  for (const OrderedJson& tool : given("tools", OrderedJson::array()))
    if (tool["type"] == "function") tools.push_back(tool);
  const OrderedJson format = {{"format", {{"type", "text"}}}};
  OrderedJson text = given("text", format);
  if (!text.contains("format") || text["format"].is_null()) text["format"] = format["format"];
  OrderedJson fields;
  fields["background"] = false;
  fields["frequency_penalty"] = r.frequency_penalty;
  fields["instructions"] = given("instructions", nullptr);
  fields["max_output_tokens"] = given("max_output_tokens", nullptr);
  fields["max_tool_calls"] = given("max_tool_calls", nullptr);
  fields["metadata"] = given("metadata", OrderedJson::object());
  fields["parallel_tool_calls"] = given("parallel_tool_calls", true);
  fields["presence_penalty"] = r.presence_penalty;
  fields["previous_response_id"] = nullptr;
  fields["prompt_cache_key"] = given("prompt_cache_key", nullptr);
  fields["reasoning"] = {{"effort", r.reasoning.empty() ? OrderedJson() : OrderedJson(r.reasoning)},
                         {"summary", nullptr}};
  fields["safety_identifier"] = given("safety_identifier", nullptr);
  fields["service_tier"] = "default";
  fields["store"] = false;
  fields["temperature"] = r.sampling.temperature;
  fields["text"] = text;
  fields["tool_choice"] = given("tool_choice", "auto");
  fields["tools"] = tools;
  fields["top_logprobs"] = std::max<int64_t>(r.logprobs, 0);
  fields["top_p"] = given("top_p", 1);
  fields["truncation"] = given("truncation", "disabled");
  return write_json(fields);
}

}  // namespace

ApiRequest parse_responses_request(std::string_view text, const ApiLimits& limits) {
  const Json json = parse_body(text, limits);
  ApiRequest r{.chat = true, .responses = true};
  Reading reading{.strict = limits.strict_fields};
  Object body(json, "", reading);
  read_common(body, r, limits);
  const Source source(text);
  read_responses(body, source, r, limits);
  refuse_fields_of_other_apis(body, r);
  body.finish();
  r.ignored = std::move(reading.ignored);
  r.repeated = repeated_fields(source.body(), r);
  return r;
}

}  // namespace ingot
