// POST /v1/messages and /v1/messages/count_tokens, in Anthropic's form.
#include "ingot/engines/serve/request_body.h"

namespace ingot {

using namespace request_body;

namespace {

// Adds one content block to a turn. Tool results become separate messages, which precede the user's text.
void read_block(Object& block, ApiMessage& turn, std::vector<ApiMessage>& results) {
  const std::string type = block.require_text("type");
  if (type == "text") {
    turn.content += block.require_text("text");
    block.ignore({"citations"});
  } else if (type == "thinking" && turn.role == "assistant") {
    turn.reasoning += block.text("thinking");
    block.ignore({"signature"});
  } else if (type == "redacted_thinking" && turn.role == "assistant") {
    block.ignore({"data"});
  } else if (type == "tool_use" && turn.role == "assistant") {
    ApiCall call{.id = block.require_text("id"), .name = block.require_text("name")};
    check_name(call.name, block.path("name"));
    call.arguments = write_json(block.require("input"));
    block.ignore({"caller"});
    turn.calls.push_back(std::move(call));
  } else if (type == "tool_result" && turn.role == "user") {
    ApiMessage result{.role = "tool", .call_id = block.require_text("tool_use_id"), .path = block.path("")};
    result.path.pop_back();
    result.content = content_of(block.find("content"), block.path("content"), block.reading());
    if (block.flag("is_error")) result.content = "Error: " + result.content;
    results.push_back(std::move(result));
  } else {
    refuse(block.path("type"), "found '", type.substr(0, 40), "' in a message by ", turn.role,
           ", expected text, tool_result of the user, tool_use or thinking of the assistant");
  }
  block.ignore({"cache_control"});
  block.finish();
}

void read_turn(const Json& json, const std::string& path, Reading& reading, std::vector<ApiMessage>& to) {
  Object object(json, path, reading);
  ApiMessage turn{.path = path};
  object.require("role");
  turn.role = object.choice("role", {"user", "assistant", "system"});
  const Json& content = object.require("content");
  std::vector<ApiMessage> results;
  if (content.is_array()) {
    for (size_t i = 0; i < content.size(); ++i) {
      Object block(content[i], element(object.path("content"), i), reading);
      read_block(block, turn, results);
    }
  } else {
    turn.content = content_of(&content, object.path("content"), reading);
  }
  object.finish();
  const bool only_results = !results.empty() && turn.content.empty();
  for (ApiMessage& r : results) to.push_back(std::move(r));
  if (!only_results) to.push_back(std::move(turn));
}

void read_messages_tools(Object& body, const Source& source, ApiRequest& r, const ApiLimits& limits) {
  const Json* tools = body.find("tools");
  if (tools == nullptr) return;
  if (!tools->is_array()) refuse_value("tools", *tools, "a list of tools");
  if (int64_t(tools->size()) > limits.tools)
    refuse("tools", "found ", tools->size(), " tools, expected at most ", limits.tools);
  for (size_t i = 0; i < tools->size(); ++i) {
    Object tool((*tools)[i], element("tools", i), body.reading());
    // Tools of other types are run or described by Anthropic's servers.
    if (const std::string type = tool.text("type", "custom"); type != "custom") {
      if (body.reading().strict) refuse(tool.path("type"), "found '", type.substr(0, 40), "', expected custom");
      body.reading().ignore("tools[]", " of type " + type);
      continue;
    }
    ChatFunction f{.name = tool.require_text("name"), .description = tool.text("description")};
    check_name(f.name, tool.path("name"));
    if (const Json* schema = tool.find("input_schema")) {
      if (!schema->is_object()) refuse_value(tool.path("input_schema"), *schema, "a JSON schema");
      f.parameters = source.at({"tools", std::to_string(i), "input_schema"});
    }
    if (tool.flag("strict")) r.strict.push_back(f.name);
    tool.ignore({"cache_control", "eager_input_streaming", "defer_loading", "allowed_callers", "input_examples"});
    tool.finish();
    r.tools.push_back(std::move(f));
  }
}

void read_messages_tool_choice(Object& body, ApiRequest& r) {
  if (body.find("tool_choice") == nullptr) return;
  Object choice = body.object("tool_choice");
  choice.require("type");
  const std::string type = choice.choice("type", {"auto", "any", "tool", "none"});
  if (type == "any") r.forced = kAnyFunction;
  if (type == "tool") {
    r.forced = choice.require_text("name");
    if (std::none_of(r.tools.begin(), r.tools.end(), [&](const ChatFunction& f) { return f.name == r.forced; }))
      refuse("tool_choice.name", "found '", r.forced.substr(0, 80), "', expected a tool in tools");
  }
  if (type == "any" && r.tools.empty()) refuse("tool_choice", "found any without tools, expected at least one");
  if (type == "none") r.tools.clear(), r.strict.clear();
  r.one_call = choice.flag("disable_parallel_tool_use");
  choice.finish();
}

// Reads how long the model should think: an effort, or a budget of tokens, which is mapped to the effort that usually
// takes as many tokens.
void read_thinking(Object& body, const Source& source, ApiRequest& r) {
  r.shows_thoughts = false;
  if (body.find("thinking") != nullptr) {
    Object thinking = body.object("thinking");
    thinking.require("type");
    const std::string type = thinking.choice("type", {"enabled", "disabled", "adaptive"});
    r.shows_thoughts = type != "disabled";
    if (type == "disabled") r.reasoning = "none";
    constexpr int64_t kLow = 4096, kMedium = 16384;
    if (const auto budget = thinking.integer("budget_tokens", 1, INT32_MAX))
      r.reasoning = *budget < kLow ? "low" : *budget < kMedium ? "medium" : "high";
    if (thinking.text("display") == "omitted") r.shows_thoughts = false;
    thinking.finish();
  }
  if (body.find("output_config") != nullptr) {
    Object config = body.object("output_config");
    if (const std::string effort = effort_of(config, "effort"); !effort.empty()) r.reasoning = effort;
    if (config.find("format") != nullptr) {
      Object format = config.object("format");
      format.require("type");
      format.choice("type", {"json_schema"});
      const Json& schema = format.require("schema");
      if (!schema.is_object()) refuse_value(format.path("schema"), schema, "a JSON schema");
      r.format = {.kind = ApiFormat::Kind::schema, .name = "answer", .path = format.path("schema")};
      r.format.schema = source.at({"output_config", "format", "schema"});
      format.finish();
    }
    config.finish();
  }
}

void read_messages(Object& body, const Source& source, ApiRequest& r, const ApiLimits& limits) {
  if (const std::string system = content_of(body.find("system"), "system", body.reading()); !system.empty())
    r.messages.push_back({.role = "system", .content = system, .path = "system"});
  const Json& messages = body.require("messages");
  if (!messages.is_array() || messages.empty()) refuse_value("messages", messages, "a list of at least one message");
  for (size_t i = 0; i < messages.size(); ++i)
    read_turn(messages[i], element("messages", i), body.reading(), r.messages);
  if (r.messages.back().role == "assistant")
    refuse(element("messages", messages.size() - 1),
           "found a message by the assistant at the end, expected one by the user: the beginning of an answer cannot "
           "be given");
  if (r.n != 1) refuse("n", "found ", r.n, ", expected 1");
  if (const auto tokens = body.integer("max_tokens", 1, INT32_MAX)) r.tokens = *tokens;
  if (const Json* stop = body.find("stop_sequences")) r.stop = stops_of(*stop, limits, "stop_sequences");
  read_messages_tools(body, source, r, limits);
  read_messages_tool_choice(body, r);
  read_thinking(body, source, r);
  body.unsupported("container", nullptr);
  body.unsupported("mcp_servers", Json::array());
  body.unsupported("stop_token_ids", Json::array());
  body.ignore({"service_tier", "context_management", "inference_geo", "betas", "cache_control", "speed"});
}

}  // namespace

ApiRequest parse_messages_request(std::string_view text, const ApiLimits& limits) {
  const Json json = parse_body(text, limits);
  ApiRequest r{.chat = true, .messages_api = true};
  Reading reading{.strict = limits.strict_fields};
  Object body(json, "", reading);
  read_common(body, r, limits);
  read_messages(body, Source(text), r, limits);
  refuse_fields_of_other_apis(body, r);
  body.finish();
  r.ignored = std::move(reading.ignored);
  return r;
}

}  // namespace ingot
