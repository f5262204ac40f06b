#include "ingot/text/grammar/schema_keywords.h"

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ingot/core/check.h"
#include "ingot/io/json.h"
#include "ingot/text/grammar/formats.h"

namespace ingot::json_schema {

void refuse(const std::string& path, const std::string& what) { fail(ErrorCode::usage, path, ": ", what); }

const OrderedJson* find(const OrderedJson& s, const char* key) {
  const auto at = s.find(key);
  return at == s.end() ? nullptr : &*at;
}

const OrderedJson& place_of(const OrderedJson& root, const OrderedJson& ref, const std::string& path) {
  const std::string text = ref.is_string() ? ref.get<std::string>() : "";
  if (text != "#" && !text.starts_with("#/"))
    refuse(path + ".$ref",
           "found " + describe_json(Json(ref)) + ", expected a place in this schema, such as #/$defs/name");
  const OrderedJson* at = &root;
  for (size_t from = 2; from <= text.size() && text.size() > 1;) {
    const size_t to = std::min(text.find('/', from), text.size());
    std::string key;
    for (size_t i = from; i < to; ++i)
      if (text[i] == '~' && i + 1 < to)
        key += text[++i] == '1' ? '/' : '~';
      else
        key += text[i];
    if (!at->is_object() || !at->contains(key)) refuse(path + ".$ref", "found nothing at '" + text.substr(0, 80) + "'");
    at = &(*at)[key];
    from = to + 1;
  }
  return *at;
}

const std::vector<std::string> kTypes = {"object", "array", "string", "integer", "number", "boolean", "null"};

bool is_of(const OrderedJson& value, const std::string& type) {
  if (type == "object") return value.is_object();
  if (type == "array") return value.is_array();
  if (type == "string") return value.is_string();
  if (type == "boolean") return value.is_boolean();
  if (type == "null") return value.is_null();
  if (type == "number") return value.is_number();
  return value.is_number_integer() || (value.is_number_float() && std::abs(value.get<double>()) < 1e18 &&
                                       value.get<double>() == double(int64_t(value.get<double>())));
}

std::vector<std::string> types_of(const OrderedJson& s, const std::string& path) {
  const OrderedJson* type = find(s, "type");
  if (type == nullptr) return {};
  std::vector<std::string> types;
  for (const OrderedJson& t : type->is_array() ? *type : OrderedJson::array({*type})) {
    if (!t.is_string() || std::find(kTypes.begin(), kTypes.end(), t.get<std::string>()) == kTypes.end())
      refuse(path + ".type", "found " + describe_json(Json(t)) +
                                 ", expected one of object, array, string, number, integer, boolean, null");
    types.push_back(t.get<std::string>());
  }
  if (types.empty()) refuse(path + ".type", "found no type, expected at least one");
  return types;
}

const std::vector<std::pair<std::string, std::vector<const char*>>> kKeywords = {
    {"array", {"items", "minItems", "maxItems"}},
    {"number", {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}},
    {"object", {"properties", "required", "additionalProperties"}},
    {"string", {"minLength", "maxLength", "pattern"}}};

std::vector<std::string> implied_types(const OrderedJson& s) {
  std::vector<std::string> types;
  for (const auto& [type, words] : kKeywords)
    if (std::any_of(words.begin(), words.end(), [&](const char* word) { return s.contains(word); }))
      types.push_back(type);
  const OrderedJson* format = find(s, "format");
  const bool text = format != nullptr && format->is_string() && dfa_of_format(format->get<std::string>()) != nullptr;
  if (text && (types.empty() || types.back() != "string")) types.push_back("string");
  return types;
}

}  // namespace ingot::json_schema
