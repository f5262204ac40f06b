#pragma once
// Reads the bodies of requests (api_request.h): the fields of a JSON object, with errors that name the field, and the
// fields that several APIs share.
#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ingot/core/check.h"
#include "ingot/engines/serve/api_request.h"
#include "ingot/io/json.h"

namespace ingot::request_body {

template <class... Note> [[noreturn]] void refuse(const std::string& param, const Note&... note) {
  throw ApiError(400, param + ": " + detail::concat(note...), param);
}
[[noreturn]] inline void refuse_value(const std::string& param, const Json& value, const std::string& expected) {
  refuse(param, "found ", describe_json(value), ", expected ", expected);
}
inline std::string element(const std::string& param, size_t i) { return param + "[" + std::to_string(i) + "]"; }

// How unknown fields are handled: as errors (strict), or by collecting their names.
struct Reading {
  bool strict = false;
  std::vector<std::string> ignored;

  // Records `path` without its indices, so that a field of many messages has one name: messages[].id
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

// Reads the fields of an object. A null field counts as absent.
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
  bool reads(std::string_view key) const { return std::find(known_.begin(), known_.end(), key) != known_.end(); }
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
  // Accepts fields that have no effect which a client could see.
  void ignore(std::initializer_list<const char*> keys) {
    for (const char* key : keys) find(key);
  }
  // Refuses a field that would change the answer and that Ingot does not support. The value `neutral` is accepted,
  // because it does not change the answer.
  void unsupported(const char* key, const Json& neutral) {
    const Json* value = find(key);
    if (value != nullptr && *value != neutral)
      throw ApiError(400, path(key) + ": this server does not support the field; leave it out", path(key),
                     "unsupported_parameter");
  }
  void finish() const {
    for (const auto& [key, value] : json_.items()) {
      if (value.is_null() || reads(key)) continue;
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

// Parses the body again with its keys in the order of the text, because a schema's properties keep their order. Parses
// at the first use.
class Source {
 public:
  explicit Source(std::string_view text) : text_(text) {}
  const OrderedJson& body() const {
    if (!body_) body_ = OrderedJson::parse(text_);  // the strict parser has accepted the text before
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

// Error 400 where the text is not JSON, or is too large.
Json parse_body(std::string_view text, const ApiLimits& limits);

// --- values
std::string effort_of(Object& object, const char* key);
std::vector<int32_t> ids_of(const Json& list, const std::string& param);
// Reads text, or a list of parts with text.
std::string content_of(const Json* content, const std::string& path, Reading& reading);
// Requires a name to follow the rule of OpenAI's and Anthropic's APIs for functions, so that no name can be mistaken
// for a part of a header.
void check_name(const std::string& name, const std::string& path);
// The arguments that the model sees for a call of a tool that takes text.
std::string arguments_of_text(const std::string& input);
std::vector<std::string> stops_of(const Json& stop, const ApiLimits& limits, const std::string& name = "stop");

// --- fields of chats, completions and responses
// Reads the model, the sampling options, the end of an answer and the stream; refuses fields of other servers.
void read_common(Object& body, ApiRequest& r, const ApiLimits& limits);
// Refuses the fields of the other APIs that would change the answer and that this API has under other names or not at
// all. Call after all fields of this API were read.
void refuse_fields_of_other_apis(Object& body, const ApiRequest& r);
void read_tools(Object& body, const Source& source, ApiRequest& r, const ApiLimits& limits);
// Reads none, auto, required, or the name of one function, and whether an answer may have several calls.
void read_tool_choice(Object& body, ApiRequest& r);
// Reads text, json_object or json_schema; `schema` holds the fields of json_schema, and `at` is the path of keys to it.
void read_format(Object& format, Object* schema, const Source& source, std::vector<std::string> at, ApiRequest& r);
bool is_schema_format(const Json& format);
// Reads the effort in the forms of OpenAI's clients, of OpenRouter's clients, and of clients of servers that render a
// template.
void read_effort(Object& body, ApiRequest& r);
// Reads the fields that only chat requests have.
void read_chat(Object& body, const Source& source, ApiRequest& r, const ApiLimits& limits);

}  // namespace ingot::request_body
