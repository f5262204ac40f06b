#include "ingot/engines/serve/request_body.h"

#include <array>

namespace ingot::request_body {

Json parse_body(std::string_view text, const ApiLimits& limits) {
  try {
    return parse_json(text, "body", {.depth = 64, .bytes = limits.body});
  } catch (const Error& e) { throw ApiError(400, e.what(), "body", "invalid_json"); }
}

std::string effort_of(Object& object, const char* key) {
  std::vector<std::string> known = {""};
  known.insert(known.end(), chat_efforts().begin(), chat_efforts().end());
  return object.choice(key, known);
}

std::vector<int32_t> ids_of(const Json& list, const std::string& param) {
  std::vector<int32_t> ids;
  for (size_t i = 0; i < list.size(); ++i)
    ids.push_back(int32_t(Object::integer_of(list[i], element(param, i), 0, INT32_MAX)));
  if (ids.empty()) refuse(param, "found an empty list, expected at least one id");
  return ids;
}

std::string content_of(const Json* content, const std::string& path, Reading& reading) {
  if (content == nullptr) return "";
  if (content->is_string()) return content->get<std::string>();
  if (!content->is_array()) refuse_value(path, *content, "a string or a list of parts");
  std::string text;
  for (size_t i = 0; i < content->size(); ++i) {
    Object part((*content)[i], element(path, i), reading);
    const std::string type = part.require_text("type");
    if (type != "text" && type != "input_text" && type != "output_text" && type != "reasoning_text" &&
        type != "summary_text" && type != "refusal")
      refuse(part.path("type"), "found '", type.substr(0, 40), "', expected text: the model has no other input");
    text += part.require_text(type == "refusal" ? "refusal" : "text");
    part.ignore({"annotations", "logprobs", "citations", "cache_control", "prompt_cache_breakpoint"});
    part.finish();
  }
  return text;
}

void check_name(const std::string& name, const std::string& path) {
  if (!is_function_name(name))
    refuse(path, "found '", name.substr(0, 80), "', expected 1 to ", kMostNameBytes, " letters, digits, _ or -");
}

std::string arguments_of_text(const std::string& input) { return write_json(Json{{"input", input}}); }

std::vector<std::string> stops_of(const Json& stop, const ApiLimits& limits, const std::string& name) {
  const Json list = stop.is_string() ? Json::array({stop}) : stop;
  if (!list.is_array()) refuse_value(name, stop, "a string or a list of strings");
  if (int64_t(list.size()) > limits.stops)
    refuse(name, "found ", list.size(), " strings, expected at most ", limits.stops);
  std::vector<std::string> stops;
  for (size_t i = 0; i < list.size(); ++i) {
    if (!list[i].is_string()) refuse_value(element(name, i), list[i], "a string");
    const std::string text = list[i].get<std::string>();
    if (text.empty() || int64_t(text.size()) > limits.stop_bytes)
      refuse(element(name, i), "found ", text.size(), " bytes, expected 1 to ", limits.stop_bytes);
    stops.push_back(text);
  }
  return stops;
}

// --- tools and formats
namespace {
// Reads name, description and parameters of a function, and all other fields of the object. `at` is the path of keys to
// the object.
void read_function(Object& function, const Source& source, std::vector<std::string> at, ApiRequest& r) {
  ChatFunction f{.name = function.require_text("name"), .description = function.text("description")};
  check_name(f.name, function.path("name"));
  if (const Json* parameters = function.find("parameters")) {
    if (!parameters->is_object()) refuse_value(function.path("parameters"), *parameters, "a JSON schema");
    at.push_back("parameters");
    f.parameters = source.at(at);
  }
  if (function.flag("strict")) r.strict.push_back(f.name);
  function.finish();
  r.tools.push_back(std::move(f));
}

}  // namespace

// A tool of another type is omitted: the model cannot call the tool, and the request's functions are useful without it.
void read_tools(Object& body, const Source& source, ApiRequest& r, const ApiLimits& limits) {
  const Json* tools = body.find("tools");
  if (tools == nullptr) return;
  if (!tools->is_array()) refuse_value("tools", *tools, "a list of functions");
  if (int64_t(tools->size()) > limits.tools)
    refuse("tools", "found ", tools->size(), " functions, expected at most ", limits.tools);
  for (size_t i = 0; i < tools->size(); ++i) {
    Object tool((*tools)[i], element("tools", i), body.reading());
    if (const std::string type = tool.require_text("type"); type != "function") {
      if (body.reading().strict) refuse(tool.path("type"), "found '", type.substr(0, 40), "', expected function");
      body.reading().ignore("tools[] of type " + type.substr(0, 40));
      continue;
    }
    std::vector<std::string> at = {"tools", std::to_string(i)};
    if (r.responses) {  // in a chat request the function is a nested object
      read_function(tool, source, std::move(at), r);
    } else {
      Object function = tool.object("function");
      at.push_back("function");
      read_function(function, source, std::move(at), r);
      tool.finish();
    }
  }
}

void read_tool_choice(Object& body, ApiRequest& r) {
  r.one_call = !body.flag("parallel_tool_calls", true);
  const Json* choice = body.find("tool_choice");
  if (choice == nullptr || *choice == "auto") return;
  if (*choice == "none") {
    r.tools.clear();
    r.strict.clear();
    return;
  }
  if (*choice == "required") {
    r.forced = kAnyFunction;
  } else {
    if (!choice->is_object()) refuse_value("tool_choice", *choice, "auto, none, required or a function");
    Object object(*choice, "tool_choice", body.reading());
    if (const std::string type = object.require_text("type"); type != "function")
      refuse("tool_choice.type", "found '", type.substr(0, 40), "', expected function");
    if (r.responses) {
      r.forced = object.require_text("name");
    } else {
      Object function = object.object("function");
      r.forced = function.require_text("name");
      function.finish();
    }
    object.finish();
    if (std::none_of(r.tools.begin(), r.tools.end(), [&](const ChatFunction& f) { return f.name == r.forced; }))
      refuse("tool_choice", "found '", r.forced.substr(0, 80), "', expected a function in tools");
  }
  if (r.tools.empty()) refuse("tool_choice", "found it without tools, expected at least one function");
}

void read_format(Object& format, Object* schema, const Source& source, std::vector<std::string> at, ApiRequest& r) {
  if (schema == nullptr) {
    format.require("type");
    const std::string kind = format.choice("type", {"text", "json_object", "json_schema"});
    r.format.kind = kind == "text" ? ApiFormat::Kind::text : ApiFormat::Kind::object;
    return;
  }
  r.format.kind = ApiFormat::Kind::schema;
  r.format.name = schema->require_text("name");
  check_name(r.format.name, schema->path("name"));
  r.format.description = schema->text("description");
  schema->flag("strict");  // an answer always follows its schema
  schema->require("schema");
  at.push_back("schema");
  r.format.schema = source.at(at);
  r.format.path = schema->path("schema");
  schema->finish();
}
bool is_schema_format(const Json& format) {
  return format.is_object() && format.contains("type") && format["type"] == "json_schema";
}
namespace {
// Reads a boolean that turns thinking off: enable_thinking of clients of Qwen's models, or enabled of OpenRouter's
// clients. The value true keeps the server's default effort.
void read_thinking_switch(Object& object, const char* key, ApiRequest& r) {
  if (!object.flag(key, true) && r.reasoning.empty()) r.reasoning = "none";
}
// Reads the object `thinking`, by which clients of DeepSeek's, GLM's and Kimi's models turn thinking off.
void read_thinking_type(Object& body, ApiRequest& r) {
  if (body.find("thinking") == nullptr) return;
  Object thinking = body.object("thinking");
  thinking.require("type");
  const std::string type = thinking.choice("type", {"enabled", "disabled", "adaptive", "auto"});
  if (type == "disabled" && r.reasoning.empty()) r.reasoning = "none";
  thinking.finish();
}
}  // namespace

void read_effort(Object& body, ApiRequest& r) {
  r.reasoning = effort_of(body, "reasoning_effort");
  const auto otherwise = [&](Object object, const char* key) {
    const std::string effort = effort_of(object, key);
    if (r.reasoning.empty()) r.reasoning = effort;
    return object;
  };
  if (body.find("reasoning") != nullptr) {
    Object reasoning = otherwise(body.object("reasoning"), "effort");
    read_thinking_switch(reasoning, "enabled", r);
    if (!r.responses && reasoning.flag("exclude")) r.shows_thoughts = false;
    reasoning.ignore({"summary", "generate_summary"});
    reasoning.finish();
  }
  if (body.find("chat_template_kwargs") != nullptr) {
    Object arguments = otherwise(body.object("chat_template_kwargs"), "reasoning_effort");
    read_thinking_switch(arguments, "enable_thinking", r);
    arguments.unsupported("model_identity", nullptr);
    arguments.unsupported("builtin_tools", Json::array());
    arguments.finish();
  }
  read_thinking_switch(body, "enable_thinking", r);
  read_thinking_type(body, r);
}

// --- all requests
namespace {

std::vector<LogitBias> bias_of(const Json& json, const ApiLimits& limits) {
  if (!json.is_object()) refuse_value("logit_bias", json, "an object of ids and numbers");
  if (int64_t(json.size()) > limits.bias)
    refuse("logit_bias", "found ", json.size(), " ids, expected at most ", limits.bias);
  std::vector<LogitBias> bias;
  for (const auto& [key, value] : json.items()) {
    const bool digits = !key.empty() && key.size() <= 9 &&
                        std::all_of(key.begin(), key.end(), [](char c) { return c >= '0' && c <= '9'; });
    if (!digits) refuse("logit_bias", "found the key '", key.substr(0, 40), "', expected a token id");
    bias.push_back(
        {.id = int32_t(std::stol(key)), .bias = float(Object::number_of(value, "logit_bias." + key, -100, 100))});
  }
  return bias;
}

// Refuses fields of llama.cpp, vLLM and SGLang that would change the answer.
void refuse_fields_of_other_servers(Object& body) {
  for (const char* factor : {"repetition_penalty", "repeat_penalty", "typical_p", "tfs_z", "length_penalty"})
    body.unsupported(factor, 1);
  for (const char* amount : {"top_a", "mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "min_tokens",
                             "min_keep", "n_probs"})
    body.unsupported(amount, 0);
  for (const char* limit : {"n_predict", "truncate_prompt_tokens", "top_n_sigma", "thinking_budget_tokens"})
    body.unsupported(limit, -1);
  for (const char* off : {"ignore_eos", "use_beam_search", "continue_final_message", "include_stop_str_in_output",
                          "no_stop_trim", "return_tokens_as_token_ids"})
    body.unsupported(off, false);
  for (const char* on : {"add_generation_prompt", "skip_special_tokens"}) body.unsupported(on, true);
  for (const char* list : {"bad_words", "logits_processors", "documents", "lora"})
    body.unsupported(list, Json::array());
  for (const char* text : {"grammar", "regex", "ebnf", "chat_template", "stop_regex", "custom_logit_processor"})
    body.unsupported(text, "");
  for (const char* other : {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
                            "json_schema", "allowed_token_ids", "logit_processors", "prompt_embeds", "prompt_logprobs",
                            "thinking_token_budget", "thinking_budget"})
    body.unsupported(other, nullptr);
}

}  // namespace

void read_common(Object& body, ApiRequest& r, const ApiLimits& limits) {
  r.model = body.text("model");
  r.n = body.integer("n", 1, limits.choices).value_or(1);
  r.sampling.temperature = body.number("temperature", 0, 2).value_or(1);
  // Clients write 0 to get the likeliest token. A very small p has the same result.
  r.sampling.top_p = std::max(body.number("top_p", 0, 1).value_or(1), 1e-9);
  r.sampling.top_k = std::max<int64_t>(body.integer("top_k", -1, INT32_MAX).value_or(0), 0);  // -1 and 0: no limit
  r.sampling.min_p = body.number("min_p", 0, 1).value_or(0);
  if (const Json* seed = body.find("seed")) {
    if (!seed->is_number_integer()) refuse_value("seed", *seed, "an integer of 64 bits");
    r.seed = seed->is_number_unsigned() ? seed->get<uint64_t>() : uint64_t(seed->get<int64_t>());
  }
  if (const Json* stop = body.find("stop")) r.stop = stops_of(*stop, limits);
  if (const Json* bias = body.find("logit_bias")) r.bias = bias_of(*bias, limits);
  r.stream = body.flag("stream");
  if (body.find("stream_options") != nullptr) {
    if (!r.stream) refuse("stream_options", "found it without stream, expected stream: true");
    Object object = body.object("stream_options");
    r.stream_usage = object.flag("include_usage");
    object.ignore({"include_obfuscation"});
    object.finish();
  }
  r.frequency_penalty = body.number("frequency_penalty", -2, 2).value_or(0);
  r.presence_penalty = body.number("presence_penalty", -2, 2).value_or(0);
  body.ignore({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
               "prompt_cache_retention", "prompt_cache_options", "moderation", "client_metadata"});
  refuse_fields_of_other_servers(body);
}

namespace {

// The names of the fields by which completions, chats, responses and messages, in this order, state the same setting.
// The name is empty where an API has no such field.
using Names = std::array<const char*, 4>;
constexpr Names kLimit = {"max_tokens", "max_completion_tokens", "max_output_tokens", "max_tokens"},
                kFormat = {"", "response_format", "text.format", "output_config.format"},
                kText = {"prompt", "messages", "input", "messages"},
                kInstructions = {"", "a message of the role system", "instructions", "system"},
                kStop = {"stop", "stop", "", "stop_sequences"},
                kThinking = {"", "reasoning_effort", "reasoning", "thinking"},
                kLogprobs = {"logprobs", "logprobs", "include", ""}, kNone = {"", "", "", ""};
// A field of one API that would change the answer. A request to another API is refused if it contains the field; the
// error names the field of that API which states the same setting.
struct KnownField {
  const char* name;
  const Names& names;      // the fields of all APIs that state the same setting
  Json neutral = nullptr;  // the value that is accepted because it has no effect; null is accepted, too
};
const std::vector<KnownField>& known_fields() {
  static const std::vector<KnownField> all = {{"max_tokens", kLimit},
                                              {"max_completion_tokens", kLimit},
                                              {"max_output_tokens", kLimit},
                                              {"response_format", kFormat, {{"type", "text"}}},
                                              {"text", kFormat, Json::object()},
                                              {"output_config", kFormat, Json::object()},
                                              {"prompt", kText},
                                              {"messages", kText},
                                              {"input", kText},
                                              {"instructions", kInstructions, ""},
                                              {"system", kInstructions, ""},
                                              {"stop", kStop, Json::array()},
                                              {"stop_sequences", kStop, Json::array()},
                                              {"thinking", kThinking},
                                              {"logprobs", kLogprobs, false},
                                              {"top_logprobs", kLogprobs, 0},
                                              {"tools", kNone, Json::array()},
                                              {"echo", kNone, false},
                                              {"suffix", kNone, ""},
                                              {"previous_response_id", kNone},
                                              {"conversation", kNone},
                                              {"background", kNone, false}};
  return all;
}

}  // namespace

void refuse_fields_of_other_apis(Object& body, const ApiRequest& r) {
  const size_t api = r.responses ? 2 : r.messages_api ? 3 : r.chat ? 1 : 0;
  for (const KnownField& f : known_fields()) {
    if (body.reads(f.name)) continue;
    const Json* value = body.find(f.name);
    if (value == nullptr || *value == f.neutral) continue;
    const std::string own = f.names[api], path = body.path(f.name);
    throw ApiError(400, path + ": this address has no such field" + (own.empty() ? "" : ", expected " + own), path,
                   "unsupported_parameter");
  }
}

}  // namespace ingot::request_body
