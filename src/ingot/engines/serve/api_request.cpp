#include "ingot/engines/serve/api_request.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>

#include "ingot/core/check.h"
#include "ingot/io/json.h"

namespace ingot {
namespace {

template <class... Note> [[noreturn]] void refuse(const std::string& param, const Note&... note) {
  throw ApiError(400, param + ": " + detail::concat(note...), param);
}
[[noreturn]] void refuse_value(const std::string& param, const Json& value, const std::string& expected) {
  refuse(param, "found ", describe_json(value), ", expected ", expected);
}
std::string element(const std::string& param, size_t i) { return param + "[" + std::to_string(i) + "]"; }

// Unknown fields are errors (strict), or their names are collected.
struct Reading {
  bool strict = false;
  std::vector<std::string> ignored;

  // `path` without its indices, so that a field of many messages has one name: messages[].id
  void ignore(const std::string& path, const std::string& note = "") {
    constexpr size_t kMostNames = 64, kMostBytes = 100;
    std::string name;
    for (size_t i = 0; i < path.size() && name.size() < kMostBytes; ++i) {
      name += path[i];
      if (path[i] == '[') i = std::min(path.find(']', i), path.size()) - 1;
    }
    name += note;
    if (ignored.size() < kMostNames && std::find(ignored.begin(), ignored.end(), name) == ignored.end())
      ignored.push_back(std::move(name));
  }
};

// An object's fields. null is as good as absent.
class Object {
 public:
  Object(const Json& json, std::string path, Reading& reading)
      : json_(json), path_(std::move(path)), reading_(reading) {
    if (!json.is_object()) refuse_value(path_.empty() ? "body" : path_, json, "an object");
  }
  Reading& reading() const { return reading_; }
  Object object(const char* key) { return Object(require(key), path(key), reading_); }
  const Json* find(const char* key) {
    known_.emplace_back(key);
    const auto it = json_.find(key);
    return it == json_.end() || it->is_null() ? nullptr : &*it;
  }
  std::string path(const std::string& key) const { return path_.empty() ? key : path_ + "." + key; }
  const Json& require(const char* key) {
    const Json* value = find(key);
    if (value == nullptr) refuse(path(key), "it is missing");
    return *value;
  }
  std::string text(const char* key, const std::string& otherwise = "") {
    const Json* value = find(key);
    if (value != nullptr && !value->is_string()) refuse_value(path(key), *value, "a string");
    return value == nullptr ? otherwise : value->get<std::string>();
  }
  std::string require_text(const char* key) {
    require(key);
    return text(key);
  }
  bool flag(const char* key, bool otherwise = false) {
    const Json* value = find(key);
    if (value != nullptr && !value->is_boolean()) refuse_value(path(key), *value, "true or false");
    return value == nullptr ? otherwise : value->get<bool>();
  }
  std::optional<int64_t> integer(const char* key, int64_t low, int64_t high) {
    const Json* value = find(key);
    if (value == nullptr) return {};
    return integer_of(*value, path(key), low, high);
  }
  std::optional<double> number(const char* key, double low, double high) {
    const Json* value = find(key);
    if (value == nullptr) return {};
    return number_of(*value, path(key), low, high);
  }
  std::string choice(const char* key, const std::vector<std::string>& allowed) {
    const std::string value = text(key, allowed[0]);
    if (std::find(allowed.begin(), allowed.end(), value) != allowed.end()) return value;
    std::string list;
    for (const std::string& a : allowed)
      if (!a.empty()) list += (list.empty() ? "" : ", ") + a;
    refuse(path(key), "found ", describe_json(Json(value)), ", expected one of ", list);
  }
  // Accepted and without effect: it changes nothing that a client could see.
  void ignore(std::initializer_list<const char*> keys) {
    for (const char* key : keys) find(key);
  }
  // A field that would change the answer and that Ingot does not read. Its neutral value changes nothing.
  void unsupported(const char* key, const Json& neutral) {
    const Json* value = find(key);
    if (value != nullptr && *value != neutral)
      throw ApiError(400, path(key) + ": it is not supported, expected none", path(key), "unsupported_parameter");
  }
  void finish() const {
    for (const auto& [key, value] : json_.items()) {
      if (value.is_null() || std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
      const std::string near = nearest_name(key, known_);
      const std::string note = near.empty() ? "" : " (did you mean " + near + "?)";
      const std::string name = key.empty() ? path("''") : path(key);
      if (reading_.strict) throw ApiError(400, name + ": an unknown field" + note, name, "unknown_parameter");
      reading_.ignore(name, note);
    }
  }
  static int64_t integer_of(const Json& value, const std::string& path, int64_t low, int64_t high) {
    // An unsigned number beyond int64_t would wrap.
    const bool fits = value.is_number_integer() &&
                      (!value.is_number_unsigned() || value.get<uint64_t>() <= uint64_t(INT64_MAX)) &&
                      value.get<int64_t>() >= low && value.get<int64_t>() <= high;
    if (!fits) refuse_value(path, value, detail::concat("an integer from ", low, " to ", high));
    return value.get<int64_t>();
  }
  static double number_of(const Json& value, const std::string& path, double low, double high) {
    if (!value.is_number() || !(value.get<double>() >= low) || !(value.get<double>() <= high))
      refuse_value(path, value, detail::concat("a number from ", low, " to ", high));
    return value.get<double>();
  }

 private:
  const Json& json_;
  std::string path_;
  Reading& reading_;
  std::vector<std::string> known_;
};

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

// Text, or a list of parts of text.
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
    part.ignore({"annotations", "logprobs"});
    part.finish();
  }
  return text;
}

// As functions are named in OpenAI's API, and so that no name can be taken for a part of a header.
bool is_name(const std::string& name) {
  return !name.empty() && name.size() <= 64 && std::all_of(name.begin(), name.end(), [](unsigned char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
  });
}
void check_name(const std::string& name, const std::string& path) {
  if (!is_name(name)) refuse(path, "found '", name.substr(0, 80), "', expected 1 to 64 letters, digits, _ or -");
}

// The arguments that the model sees for a call of a tool whose input is text.
std::string arguments_of_text(const std::string& input) { return write_json(Json{{"input", input}}); }

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
  const Json* refusal = object.find("refusal");  // what the assistant said in place of an answer
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

// The body once more with its keys in their order, which a schema's properties keep; read only where one is looked up.
class Source {
 public:
  explicit Source(std::string_view text) : text_(text) {}
  const OrderedJson& body() const {
    if (!body_) body_ = OrderedJson::parse(text_);  // it has been read strictly before
    return *body_;
  }
  std::string at(const std::vector<std::string>& keys) const {
    const OrderedJson* value = &body();
    for (const std::string& key : keys) value = value->is_array() ? &(*value)[std::stoul(key)] : &(*value)[key];
    return write_json(*value);
  }

 private:
  const std::string_view text_;
  mutable std::optional<OrderedJson> body_;
};

// Name, description and parameters; all of the object's fields are read. `at`: the keys that lead to it.
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

// A tool of another type is left out: the model cannot call it, and the functions beside it are of use without it.
void read_tools(Object& body, const Source& source, ApiRequest& r, const ApiLimits& limits) {
  const Json* tools = body.find("tools");
  if (tools == nullptr) return;
  if (!tools->is_array() || int64_t(tools->size()) > limits.tools)
    refuse_value("tools", *tools, detail::concat("a list of at most ", limits.tools, " functions"));
  for (size_t i = 0; i < tools->size(); ++i) {
    Object tool((*tools)[i], element("tools", i), body.reading());
    if (const std::string type = tool.require_text("type"); type != "function") {
      if (body.reading().strict) refuse(tool.path("type"), "found '", type.substr(0, 40), "', expected function");
      body.reading().ignore("tools[] of type " + type.substr(0, 40));
      continue;
    }
    std::vector<std::string> at = {"tools", std::to_string(i)};
    if (r.responses) {  // a chat's function is an object of its own
      read_function(tool, source, std::move(at), r);
    } else {
      Object function = tool.object("function");
      at.push_back("function");
      read_function(function, source, std::move(at), r);
      tool.finish();
    }
  }
}

// none, auto, required, or one function by its name.
void read_tool_choice(Object& body, ApiRequest& r) {
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

// text, json_object or json_schema; `schema` holds the fields of the latter.
void read_format(Object& format, Object* schema, const Source& source, std::vector<std::string> at, ApiRequest& r) {
  if (schema == nullptr) {
    format.require("type");
    const std::string kind = format.choice("type", {"text", "json_object"});
    r.format.kind = kind == "text" ? ApiFormat::Kind::text : ApiFormat::Kind::object;
    return;
  }
  r.format.kind = ApiFormat::Kind::schema;
  r.format.name = schema->require_text("name");
  check_name(r.format.name, schema->path("name"));
  r.format.description = schema->text("description");
  schema->flag("strict");  // an answer is held to its schema either way
  schema->require("schema");
  at.push_back("schema");
  r.format.schema = source.at(at);
  r.format.path = schema->path("schema");
  schema->finish();
}
bool is_schema_format(const Json& format) {
  return format.is_object() && format.contains("type") && format["type"] == "json_schema";
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

// As OpenAI's clients ask for an effort, as OpenRouter's do, and as those of servers that render a template.
void read_effort(Object& body, ApiRequest& r) {
  r.reasoning = effort_of(body, "reasoning_effort");
  const auto otherwise = [&](Object object, const char* key) {
    const std::string effort = effort_of(object, key);
    if (r.reasoning.empty()) r.reasoning = effort;
    return object;
  };
  if (body.find("reasoning") != nullptr) {
    Object reasoning = otherwise(body.object("reasoning"), "effort");
    reasoning.ignore({"summary", "generate_summary"});
    reasoning.finish();
  }
  if (body.find("chat_template_kwargs") != nullptr) {
    Object arguments = otherwise(body.object("chat_template_kwargs"), "reasoning_effort");
    arguments.unsupported("model_identity", nullptr);
    arguments.unsupported("builtin_tools", Json::array());
    arguments.finish();
  }
}

void read_chat(Object& body, const Source& source, ApiRequest& r, const ApiLimits& limits) {
  const Json& messages = body.require("messages");
  if (!messages.is_array() || messages.empty()) refuse_value("messages", messages, "a list of at least one message");
  for (size_t i = 0; i < messages.size(); ++i)
    r.messages.push_back(message_of(messages[i], element("messages", i), body.reading()));
  read_tools(body, source, r, limits);
  read_tool_choice(body, r);
  read_response_format(body, source, r);
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
  body.ignore({"parallel_tool_calls", "verbosity", "prediction"});
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

std::vector<std::string> stops_of(const Json& stop, const ApiLimits& limits, const std::string& name = "stop") {
  const Json list = stop.is_string() ? Json::array({stop}) : stop;
  if (!list.is_array() || int64_t(list.size()) > limits.stops)
    refuse_value(name, stop, detail::concat("a string, or at most ", limits.stops));
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

std::vector<LogitBias> bias_of(const Json& json, const ApiLimits& limits) {
  if (!json.is_object() || int64_t(json.size()) > limits.bias)
    refuse_value("logit_bias", json, detail::concat("an object of at most ", limits.bias, " ids"));
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

// Fields of llama.cpp, vLLM and SGLang that would change the answer.
void refuse_fields_of_other_servers(Object& body) {
  for (const char* factor : {"repetition_penalty", "repeat_penalty", "typical_p", "tfs_z", "length_penalty"})
    body.unsupported(factor, 1);
  for (const char* amount : {"top_a", "mirostat", "dry_multiplier", "xtc_probability", "dynatemp_range", "min_tokens"})
    body.unsupported(amount, 0);
  for (const char* limit : {"n_predict", "truncate_prompt_tokens"}) body.unsupported(limit, -1);
  for (const char* off : {"ignore_eos", "use_beam_search", "continue_final_message"}) body.unsupported(off, false);
  body.unsupported("add_generation_prompt", true);
  for (const char* list : {"stop_token_ids", "bad_words", "logits_processors", "documents", "lora"})
    body.unsupported(list, Json::array());
  for (const char* text : {"grammar", "regex", "ebnf", "chat_template"}) body.unsupported(text, "");
  for (const char* other : {"guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs",
                            "json_schema", "allowed_token_ids", "logit_processors", "prompt_embeds", "prompt_logprobs"})
    body.unsupported(other, nullptr);
}

void read_common(Object& body, ApiRequest& r, const ApiLimits& limits) {
  r.model = body.text("model");
  r.n = body.integer("n", 1, limits.choices).value_or(1);
  r.sampling.temperature = body.number("temperature", 0, 2).value_or(1);
  // 0 is written by clients that want the likeliest token, which any p as small leaves.
  r.sampling.top_p = std::max(body.number("top_p", 0, 1).value_or(1), 1e-9);
  r.sampling.top_k = std::max<int64_t>(body.integer("top_k", -1, INT32_MAX).value_or(0), 0);  // -1: all, as 0
  r.sampling.min_p = body.number("min_p", 0, 0.999999).value_or(0);
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

}  // namespace

std::string to_json(const ApiError& e) {
  const auto or_null = [](const std::string& s) { return s.empty() ? OrderedJson() : OrderedJson(s); };
  // Names in it may be a client's, and as long as its request.
  const auto most = [](const std::string& s, size_t n) { return s.size() > n ? s.substr(0, n) + "..." : s; };
  OrderedJson error;
  error["message"] = most(e.what(), 800);
  error["type"] = e.type();
  error["param"] = or_null(most(e.param, 200));
  error["code"] = or_null(e.code);
  return show_json(OrderedJson{{"error", error}});
}

namespace {

Json parse_body(std::string_view text, const ApiLimits& limits) {
  try {
    return parse_json(text, "body", {.depth = 64, .bytes = limits.body});
  } catch (const Error& e) { throw ApiError(400, e.what(), "body", "invalid_json"); }
}

// The calls and results of tools that are not functions. A client may bring such items from a conversation with another
// model. A call without call_id was run by that model's server, and its result is not an item of its own.
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

// One item of a conversation. Thoughts and calls stand alone here; the model sees them as a turn of the assistant.
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
  body.unsupported("top_logprobs", 0);
  // Truncation cuts nothing of what fits, and max_tool_calls counts calls that a server makes by itself: none here.
  body.ignore({"parallel_tool_calls", "include", "truncation", "max_tool_calls"});
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
  fields["instructions"] = given("instructions", nullptr);
  fields["max_output_tokens"] = given("max_output_tokens", nullptr);
  fields["metadata"] = given("metadata", OrderedJson::object());
  fields["parallel_tool_calls"] = given("parallel_tool_calls", true);
  fields["previous_response_id"] = nullptr;
  fields["reasoning"] = {{"effort", r.reasoning.empty() ? OrderedJson() : OrderedJson(r.reasoning)},
                         {"summary", nullptr}};
  fields["store"] = false;
  fields["temperature"] = r.sampling.temperature;
  fields["text"] = text;
  fields["tool_choice"] = given("tool_choice", "auto");
  fields["tools"] = tools;
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
  body.finish();
  r.ignored = std::move(reading.ignored);
  r.repeated = repeated_fields(source.body(), r);
  return r;
}

ApiRequest parse_api_request(std::string_view text, bool chat, const ApiLimits& limits) {
  const Json json = parse_body(text, limits);
  ApiRequest r{.chat = chat};
  Reading reading{.strict = limits.strict_fields};
  Object body(json, "", reading);
  read_common(body, r, limits);
  if (chat)
    read_chat(body, Source(text), r, limits);
  else
    read_completion(body, r, limits);
  body.finish();
  r.ignored = std::move(reading.ignored);
  if (int64_t(r.prompts.size()) * r.n > limits.choices)
    refuse("n", "found ", r.n, " of ", r.prompts.size(), " prompts, expected at most ", limits.choices, " choices");
  return r;
}

namespace {

// --- Anthropic's form
// What one block adds to a turn. Results are messages of their own, which stand before the user's text.
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
  if (!tools->is_array() || int64_t(tools->size()) > limits.tools)
    refuse_value("tools", *tools, detail::concat("a list of at most ", limits.tools, " tools"));
  for (size_t i = 0; i < tools->size(); ++i) {
    Object tool((*tools)[i], element("tools", i), body.reading());
    // Other types are tools that Anthropic's servers run or describe.
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
  choice.ignore({"disable_parallel_tool_use"});
  choice.finish();
}

// How long to think: an effort, or a budget of tokens, which stands for the effort that usually takes as many.
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
  body.finish();
  r.ignored = std::move(reading.ignored);
  return r;
}

TokenizeRequest parse_tokenize_request(std::string_view text, const ApiLimits& limits) {
  const Json json = parse_body(text, limits);
  Reading reading{.strict = limits.strict_fields};
  Object body(json, "", reading);
  TokenizeRequest t;
  t.pieces = body.flag("return_token_strs");
  t.llama_pieces = body.flag("with_pieces");
  if (body.find("messages") != nullptr) {
    t.chat.chat = true;
    read_chat(body, Source(text), t.chat, limits);
    return t;
  }
  const bool of_vllm = body.find("prompt") != nullptr;
  t.text = of_vllm ? body.require_text("prompt") : body.require_text("content");
  t.special = body.flag(of_vllm ? "add_special_tokens" : "add_special", of_vllm);
  return t;
}

std::vector<int32_t> parse_detokenize_request(std::string_view text, const ApiLimits& limits) {
  const Json json = parse_body(text, limits);
  Reading reading{.strict = limits.strict_fields};
  Object body(json, "", reading);
  const Json& tokens = body.require("tokens");
  if (!tokens.is_array()) refuse_value("tokens", tokens, "a list of token ids");
  return tokens.empty() ? std::vector<int32_t>() : ids_of(tokens, "tokens");
}

namespace {

// The calls so far, by their ids; of two with one id the later.
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
