#include "ingot/text/grammar/schema_compiler.h"

#include <algorithm>

#include "ingot/io/json.h"
#include "ingot/text/grammar/schema_alternatives.h"

namespace ingot::json_schema {

SchemaCompiler::Rule SchemaCompiler::compile() {
  const Rule rule = rule_of(root_, where_);
  const std::vector<bool> ends = g_.ends();
  for (const auto& [schema, made] : rules_)
    if (!ends[size_t(made.rule)]) refuse(made.path, "found a schema that no finite value has");
  return rule;
}

// Each part of the schema becomes one rule, however many references lead to it.
SchemaCompiler::Rule SchemaCompiler::rule_of(const OrderedJson& schema, const std::string& path) {
  const auto [at, added] = rules_.try_emplace(&schema, Made{});
  if (!added) return at->second.rule;
  const Rule rule = g_.declare();
  at->second = {rule, path};
  check_size();
  g_.define(rule, body(schema, path));
  return rule;
}
void SchemaCompiler::check_size() const {
  if (g_.size() > kMostNodes) refuse(where_, "found too large a schema");
}
SchemaCompiler::Node SchemaCompiler::any() { return g_.call(parts_.any, kEnd); }
SchemaCompiler::Node SchemaCompiler::body(const OrderedJson& s, const std::string& path) {
  if (s.is_boolean() && s.get<bool>()) return any();
  if (!s.is_object()) {
    if (!exact_) return any();
    refuse(path, "found " + describe_json(Json(s)) + ", expected a schema");
  }
  Node node = kEnd;
  // Alternatives next to properties or values mostly state which properties occur together; the grammar ignores this
  // condition.
  const bool says_more = !exact_ && (s.contains("properties") || s.contains("const") || s.contains("enum"));
  if (const OrderedJson* ref = find(s, "$ref"))
    if (held([&] { only(s, path, {"$ref"}), node = g_.call(target(*ref, path), kEnd); })) return node;
  if (const OrderedJson* all = find(s, "allOf"))
    if (held([&] { node = all_of(*all, s, path); })) return node;
  for (const char* key : {"anyOf", "oneOf"})
    if (const OrderedJson* list = find(s, key); list != nullptr && !says_more)
      if (held([&] { only(s, path, {key}), node = any_of(*list, path + "." + key, key); })) return node;
  if (s.contains("const"))
    if (held([&] { only(s, path, {"const", "type"}), node = values(OrderedJson::array({s["const"]}), s, path); }))
      return node;
  if (const OrderedJson* list = find(s, "enum"))
    if (held([&] { only(s, path, {"enum", "type"}), node = values(*list, s, path); })) return node;
  if (held([&] { node = typed(s, path); })) return node;
  return any();
}
// The alternatives of anyOf or oneOf. Under oneOf a value must not be valid under two alternatives.
SchemaCompiler::Node SchemaCompiler::any_of(const OrderedJson& list, const std::string& path, const std::string& key) {
  if (!list.is_array() || list.empty()) refuse(path, "expected a list of schemas");
  std::vector<Node> options;
  for (size_t i = 0; i < list.size(); ++i)
    options.push_back(g_.call(rule_of(list[i], path + "[" + std::to_string(i) + "]"), kEnd));
  if (exact_ && key == "oneOf") {
    for (size_t i = 0; i < list.size(); ++i)
      for (size_t k = i + 1; k < list.size(); ++k)
        if (!are_distinct(list[i], list[k], root_))
          refuse(path, detail::concat("found alternatives ", i, " and ", k,
                                      " that one value may have, expected them to differ in type or in const or enum "
                                      "of a required property"));
  }
  return g_.either(std::move(options));
}
SchemaCompiler::Node SchemaCompiler::all_of(const OrderedJson& list, const OrderedJson& s, const std::string& path) {
  if (!exact_) {
    merged_.push_back(merged(s, 0));
    return g_.call(rule_of(merged_.back(), path), kEnd);
  }
  only(s, path, {"allOf"});
  if (!list.is_array() || list.size() != 1) refuse(path + ".allOf", "found more than one schema, expected one");
  return g_.call(rule_of(list[0], path + ".allOf[0]"), kEnd);
}
// Makes one schema from the parts of allOf and the keywords beside allOf: all properties, all required names, and the
// first occurrence of every other keyword.
OrderedJson SchemaCompiler::merged(const OrderedJson& s, int depth) {
  constexpr int kDeepest = 16;
  if (depth > kDeepest || !s.is_object()) refuse(where_, "found an allOf that cannot be merged");
  if (const OrderedJson* ref = find(s, "$ref")) return merged(place_of(root_, *ref, where_), depth + 1);
  OrderedJson out = s;
  out.erase("allOf");
  const OrderedJson* all = find(s, "allOf");
  if (all == nullptr || !all->is_array()) return out;
  for (const OrderedJson& part : *all) {
    const OrderedJson more = merged(part, depth + 1);
    for (const auto& [key, value] : more.items()) {
      if (key == "properties" && out.contains(key) && out[key].is_object() && value.is_object()) {
        for (const auto& [name, schema] : value.items())
          if (!out[key].contains(name)) out[key][name] = schema;
      } else if (key == "required" && out.contains(key) && out[key].is_array() && value.is_array()) {
        for (const OrderedJson& name : value) out[key].push_back(name);
      } else if (!out.contains(key)) {
        out[key] = value;
      }
    }
  }
  return out;
}
SchemaCompiler::Node SchemaCompiler::values(const OrderedJson& list, const OrderedJson& s, const std::string& path) {
  if (!list.is_array() || list.empty()) refuse(path + ".enum", "expected a list of at least one value");
  if (int64_t(list.size()) > kMostValues)
    refuse(path + ".enum", detail::concat("found ", list.size(), " values, expected at most ", kMostValues));
  std::vector<Node> options;
  const std::vector<std::string> types = types_of(s, path);
  for (const OrderedJson& value : list)
    if (types.empty() || std::any_of(types.begin(), types.end(), [&](const auto& t) { return is_of(value, t); }))
      options.push_back(g_.text(write_json(value), kEnd));
  if (options.empty()) refuse(path, "found no value of enum that has the type");
  check_size();
  return g_.either(std::move(options));
}
SchemaCompiler::Node SchemaCompiler::typed(const OrderedJson& s, const std::string& path) {
  std::vector<std::string> types = types_of(s, path);
  std::vector<const char*> allowed = {"type", "format"};
  if (types.empty()) {  // the keywords imply the type
    types = implied_types(s);
    if (types.size() > 1) {
      if (exact_) refuse(path + ".type", "it is missing");
      if (!s.contains("properties")) return any();
      types = {"object"};
    }
  }
  if (types.empty()) return only(s, path, allowed), any();
  for (const std::string& type : types)
    for (const auto& [name, words] : kKeywords)
      if (name == type || (name == "number" && type == "integer"))
        allowed.insert(allowed.end(), words.begin(), words.end());
  only(s, path, allowed);
  if (const OrderedJson* format = find(s, "format"); format != nullptr && !format->is_string() && exact_)
    refuse(path + ".format", "expected a string");
  std::vector<Node> options;
  for (const std::string& type : types) options.push_back(of_type(type, s, path));
  return g_.either(std::move(options));
}
SchemaCompiler::Node SchemaCompiler::of_type(const std::string& type, const OrderedJson& s, const std::string& path) {
  if (type == "object") return object(s, path);
  if (type == "array") return array(s, path);
  if (type == "string") return text(s, path);
  if (type == "integer" || type == "number") return numbers(s, path, type == "integer");
  if (type == "null") return g_.text("null", kEnd);
  return g_.either({g_.text("true", kEnd), g_.text("false", kEnd)});
}
SchemaCompiler::Rule SchemaCompiler::target(const OrderedJson& ref, const std::string& path) {
  const OrderedJson& place = place_of(root_, ref, path);
  return rule_of(place, where_ + ref.get<std::string>().substr(0, 80));
}
// Annotations do not affect validity; every other keyword must be among `allowed`.
void SchemaCompiler::only(const OrderedJson& s, const std::string& path, const std::vector<const char*>& allowed) {
  static const std::set<std::string> annotations = {
      "title",        "description", "default",   "examples",        "example",
      "$schema",      "$id",         "$comment",  "$defs",           "definitions",
      "deprecated",   "readOnly",    "writeOnly", "contentEncoding", "contentMediaType",
      "discriminator"};
  if (!exact_) return;
  for (const auto& [key, value] : s.items())
    if (annotations.count(key) == 0 && !key.starts_with("x-") &&
        std::find(allowed.begin(), allowed.end(), key) == allowed.end())
      refuse(path + "." + key.substr(0, 40), "it is not supported here");
}

}  // namespace ingot::json_schema
