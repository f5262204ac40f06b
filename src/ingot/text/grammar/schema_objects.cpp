// The grammar of objects and arrays under a schema.
#include <algorithm>
#include <tuple>

#include "ingot/io/json.h"
#include "ingot/text/grammar/schema_compiler.h"
#include "ingot/text/utf8.h"

namespace ingot::json_schema {

namespace {

std::u32string code_points(const std::string& text) {
  std::u32string out;
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = utf8_decode(text.data() + i);
    out += c.code;
    i += size_t(c.length);
  }
  return out;
}

}  // namespace

// The listed properties in their order, then the properties that a schema in additionalProperties allows. There are
// two chains of nodes: `first` for a still empty object, and `later`, which begins with a comma.
SchemaCompiler::Node SchemaCompiler::object(const OrderedJson& s, const std::string& path) {
  static const OrderedJson none = OrderedJson::object(), anything = true;
  const OrderedJson* listed = find(s, "properties");
  if (listed != nullptr && !listed->is_object()) {
    if (exact_) refuse(path + ".properties", "expected an object of schemas");
    listed = nullptr;
  }
  const OrderedJson* more = find(s, "additionalProperties");
  const bool closed = more != nullptr && more->is_boolean() && !more->get<bool>();
  const bool has_schema = more != nullptr && !more->is_boolean();
  std::vector<const OrderedJson*> schemas;
  std::vector<std::string> names;
  for (const auto& [name, schema] : (listed == nullptr ? none : *listed).items())
    names.push_back(name), schemas.push_back(&schema);
  const std::set<std::string> required = required_of(s, path);
  for (const std::string& name : required) {
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    if (closed && exact_)
      refuse(path + ".required", "found " + describe_json(Json(name)) + ", expected a name in properties");
    if (!closed) names.push_back(name), schemas.push_back(has_schema ? more : &anything);
  }
  if (names.empty() && !closed) {
    if (!has_schema) return g_.call(parts_.any_object, kEnd);
    return parts_.object(parts_.text, rule_of(*more, path + ".additionalProperties"), kEnd);
  }
  const Node close = g_.call(parts_.space, parts_.mark('}', kEnd));
  Node first = close, later = close;
  if (has_schema) std::tie(first, later) = further(*more, names, close, path);
  for (size_t i = names.size(); i-- > 0;) {
    const Rule value = rule_of(*schemas[i], path + ".properties." + names[i]);
    const Node key_text =
        g_.text(write_json(OrderedJson(names[i])) + ":", g_.call(parts_.space, g_.call(value, later)));
    const Node said = g_.call(parts_.space, key_text), next = parts_.mark(',', said);
    const bool needed = required.count(names[i]) != 0;
    // Any property that follows this one has a property before it, and so begins with a comma.
    const Node skipped_first = first, skipped_later = later;
    first = needed ? said : g_.either({said, skipped_first});
    later = needed ? next : g_.either({next, skipped_later});
  }
  return parts_.mark('{', first);
}
// Any number of properties with names that are not listed; returns the nodes for an empty object and for a non-empty
// object.
std::pair<SchemaCompiler::Node, SchemaCompiler::Node> SchemaCompiler::further(const OrderedJson& schema,
                                                                              const std::vector<std::string>& names,
                                                                              Node close, const std::string& path) {
  std::vector<std::u32string> known;
  for (const std::string& name : names) known.push_back(code_points(name));
  const Rule key = g_.rule(parts_.string_of(strings_except(known), kEnd));
  const Rule value = rule_of(schema, path + ".additionalProperties");
  const Node later = g_.either({close});
  const Node pair = g_.call(key, parts_.mark(':', g_.call(parts_.space, g_.call(value, later))));
  const Node said = g_.call(parts_.space, pair);
  g_.add(later, parts_.mark(',', said));
  return {g_.either({close, said}), later};
}
std::set<std::string> SchemaCompiler::required_of(const OrderedJson& s, const std::string& path) {
  std::set<std::string> required;
  const OrderedJson* list = find(s, "required");
  if (list == nullptr) return required;
  held([&] {
    if (!list->is_array()) refuse(path + ".required", "expected a list of names");
    for (const OrderedJson& name : *list) {
      if (!name.is_string()) refuse(path + ".required", "found " + describe_json(Json(name)) + ", expected a name");
      required.insert(name.get<std::string>());
    }
  });
  return required;
}
int64_t SchemaCompiler::count(const OrderedJson& s, const std::string& path, const char* key, int64_t otherwise,
                              int64_t most) {
  const OrderedJson* value = find(s, key);
  if (value == nullptr) return otherwise;
  const bool fits = value->is_number_integer() && value->get<int64_t>() >= 0 &&
                    (!value->is_number_unsigned() || value->get<uint64_t>() <= uint64_t(most)) &&
                    value->get<int64_t>() <= most;
  if (!fits && !exact_) return otherwise;
  if (!fits) refuse(path + "." + key, detail::concat("expected an integer from 0 to ", most));
  return value->get<int64_t>();
}
// minItems and maxItems, or minLength and maxLength; -1: no upper limit.
std::pair<int64_t, int64_t> SchemaCompiler::counts(const OrderedJson& s, const std::string& path, const char* low_key,
                                                   const char* high_key, int64_t most) {
  const int64_t low = count(s, path, low_key, 0, most), high = count(s, path, high_key, -1, most);
  if (high < 0 || low <= high) return {low, high};
  if (exact_) refuse(path + "." + low_key, detail::concat("found more than ", high_key));
  return {0, -1};
}
SchemaCompiler::Node SchemaCompiler::array(const OrderedJson& s, const std::string& path) {
  const OrderedJson* items = find(s, "items");
  const Rule item = items == nullptr ? parts_.any : rule_of(*items, path + ".items");
  const auto [low, high] = counts(s, path, "minItems", "maxItems", kMostItems);
  const Node close = g_.call(parts_.space, parts_.mark(']', kEnd));
  // After the required items: any number of further items, or as many as maxItems allows.
  Node rest = close;
  const auto one = [&](Node next) { return g_.call(parts_.space, g_.call(item, next)); };
  if (high < 0) {
    rest = g_.either({close});
    g_.add(rest, parts_.mark(',', one(rest)));
  }
  const int64_t chain = high < 0 ? std::max<int64_t>(low, 1) : high;  // items with nodes of their own
  for (int64_t i = chain; i > 1; --i) {
    const Node next = parts_.mark(',', one(rest));
    rest = i <= low ? next : g_.either({close, next});
  }
  if (high == 0) return parts_.mark('[', close);
  const Node first = one(rest);
  return parts_.mark('[', low > 0 ? first : g_.either({close, first}));
}

}  // namespace ingot::json_schema
