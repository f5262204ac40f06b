#include "ingot/text/grammar/json_schema.h"

#include <algorithm>
#include <deque>
#include <map>
#include <set>

#include "ingot/io/json.h"
#include "ingot/text/grammar/decimals.h"
#include "ingot/text/grammar/formats.h"
#include "ingot/text/grammar/json_parts.h"
#include "ingot/text/grammar/pattern.h"
#include "ingot/text/utf8.h"

namespace ingot {
namespace {

using Node = Grammar::Node;
using Rule = Grammar::Rule;
constexpr Node kEnd = Grammar::kEnd;

[[noreturn]] void refuse(const std::string& path, const std::string& what) { fail(ErrorCode::usage, path, ": ", what); }

std::u32string code_points(const std::string& text) {
  std::u32string out;
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = utf8_decode(text.data() + i);
    out += c.code;
    i += size_t(c.length);
  }
  return out;
}

const OrderedJson* find(const OrderedJson& s, const char* key) {
  const auto at = s.find(key);
  return at == s.end() ? nullptr : &*at;
}

// The part of the schema that a $ref names: "#", or "#/" and the keys of the path, with ~0 and ~1 for ~ and /.
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

// The keywords of each type. An integer has the keywords of a number.
const std::vector<std::pair<std::string, std::vector<const char*>>> kKeywords = {
    {"array", {"items", "minItems", "maxItems"}},
    {"number", {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}},
    {"object", {"properties", "required", "additionalProperties"}},
    {"string", {"minLength", "maxLength", "pattern"}}};

// The types whose keywords a schema without `type` has.
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

// Whether two schemas may be alternatives of oneOf: no value of one alternative's grammar is valid under the other.
class Distinguisher {
 public:
  explicit Distinguisher(const OrderedJson& root) : root_(root) {}

  bool distinguishes(const OrderedJson& a, const OrderedJson& b, int depth = 0) const {
    constexpr int kDeepest = 12;
    if (depth > kDeepest || !a.is_object() || !b.is_object()) return false;
    for (const auto& [s, other] : {std::pair(&a, &b), std::pair(&b, &a)}) {
      if (const OrderedJson* ref = find(*s, "$ref")) return distinguishes(place_of(root_, *ref, ""), *other, depth + 1);
      for (const char* key : {"anyOf", "oneOf", "allOf"})
        if (const OrderedJson* list = find(*s, key))
          return list->is_array() &&
                 std::all_of(list->begin(), list->end(), [&, other = other](const OrderedJson& option) {
                   return distinguishes(option, *other, depth + 1);
                 });
    }
    const auto values_a = values_of(a), values_b = values_of(b);
    if (values_a && values_b)
      return std::none_of(values_a->begin(), values_a->end(), [&](const OrderedJson& v) {
        return std::any_of(values_b->begin(), values_b->end(),
                           [&](const OrderedJson& w) { return Json(v) == Json(w); });
      });
    if (values_a) return none_has_type(*values_a, b);
    if (values_b) return none_has_type(*values_b, a);
    return std::all_of(kTypes.begin(), kTypes.end(), [&](const std::string& type) {
      const bool both = (makes(a, type) && allows(b, type)) || (makes(b, type) && allows(a, type));
      return !both || (type == "object" && distinguishes_objects(a, b, depth));
    });
  }

 private:
  static std::optional<OrderedJson> values_of(const OrderedJson& s) {
    if (s.contains("const")) return OrderedJson::array({s["const"]});
    const OrderedJson* list = find(s, "enum");
    if (list == nullptr || !list->is_array()) return {};
    return *list;
  }
  static bool none_has_type(const OrderedJson& values, const OrderedJson& s) {
    const std::vector<std::string> types = types_of(s, "");
    return !types.empty() && std::none_of(values.begin(), values.end(), [&](const OrderedJson& v) {
      return std::any_of(types.begin(), types.end(), [&](const std::string& t) { return is_of(v, t); });
    });
  }
  static bool has(const std::vector<std::string>& types, const std::string& type) {
    return std::any_of(types.begin(), types.end(), [&](const std::string& t) {
      return t == type || (t == "number" && type == "integer") || (t == "integer" && type == "number");
    });
  }
  static bool allows(const OrderedJson& s, const std::string& type) {
    const auto types = types_of(s, "");
    return types.empty() || has(types, type);
  }
  static bool makes(const OrderedJson& s, const std::string& type) {
    auto types = types_of(s, "");
    if (types.empty()) types = implied_types(s);
    return types.empty() || has(types, type);
  }
  bool distinguishes_objects(const OrderedJson& a, const OrderedJson& b, int depth) const {
    for (const auto& [s, other] : {std::pair(&a, &b), std::pair(&b, &a)}) {
      const OrderedJson* required = find(*s, "required");
      if (required == nullptr || !required->is_array()) continue;
      for (const OrderedJson& name : *required) {
        const OrderedJson *mine = property(*s, name), *theirs = property(*other, name);
        if (mine != nullptr && theirs != nullptr && distinguishes(*mine, *theirs, depth + 1)) return true;
        const OrderedJson* more = find(*other, "additionalProperties");
        if (theirs == nullptr && more != nullptr && *more == false) return true;
      }
    }
    return false;
  }
  static const OrderedJson* property(const OrderedJson& s, const OrderedJson& name) {
    const OrderedJson* properties = find(s, "properties");
    if (properties == nullptr || !properties->is_object() || !name.is_string()) return nullptr;
    return find(*properties, name.get<std::string>().c_str());
  }
  const OrderedJson& root_;
};

class Compiler {
 public:
  // `exact`: a keyword that the grammar cannot express is an error. Otherwise the keyword is ignored.
  Compiler(Grammar& g, const OrderedJson& root, const std::string& where, bool exact)
      : g_(g), parts_(g), root_(root), where_(where), exact_(exact) {}

  Rule compile() {
    const Rule rule = rule_of(root_, where_);
    const std::vector<bool> ends = g_.ends();
    for (const auto& [schema, made] : rules_)
      if (!ends[size_t(made.rule)]) refuse(made.path, "found a schema that no finite value has");
    return rule;
  }

 private:
  struct Made {
    Rule rule;
    std::string path;
  };
  static constexpr size_t kMostNodes = 200000;
  static constexpr int64_t kMostItems = 256, kMostLength = 1024, kMostValues = 1000;

  // Each part of the schema becomes one rule, however many references lead to it.
  Rule rule_of(const OrderedJson& schema, const std::string& path) {
    const auto [at, added] = rules_.try_emplace(&schema, Made{});
    if (!added) return at->second.rule;
    const Rule rule = g_.declare();
    at->second = {rule, path};
    check_size();
    g_.define(rule, body(schema, path));
    return rule;
  }
  void check_size() const {
    if (g_.size() > kMostNodes) refuse(where_, "found too large a schema");
  }
  // Runs the action for one keyword. In exact mode an Error passes on; otherwise the keyword is ignored.
  template <class Action> bool held(const Action& action) {
    if (exact_) return action(), true;
    try {
      action();
    } catch (const Error&) {
      check_size();
      return false;
    }
    return true;
  }
  // The same for actions whose errors lack the path.
  template <class Action> bool held(const std::string& path, const Action& action) {
    return held([&] {
      try {
        action();
      } catch (const Error& e) { refuse(path, e.what()); }
    });
  }

  Node any() { return g_.call(parts_.any, kEnd); }

  Node body(const OrderedJson& s, const std::string& path) {
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
  Node any_of(const OrderedJson& list, const std::string& path, const std::string& key) {
    if (!list.is_array() || list.empty()) refuse(path, "expected a list of schemas");
    std::vector<Node> options;
    for (size_t i = 0; i < list.size(); ++i)
      options.push_back(g_.call(rule_of(list[i], path + "[" + std::to_string(i) + "]"), kEnd));
    if (exact_ && key == "oneOf") {
      const Distinguisher distinguisher(root_);
      for (size_t i = 0; i < list.size(); ++i)
        for (size_t k = i + 1; k < list.size(); ++k)
          if (!distinguisher.distinguishes(list[i], list[k]))
            refuse(path, detail::concat("found alternatives ", i, " and ", k,
                                        " that one value may have, expected them to differ in type or in const or enum "
                                        "of a required property"));
    }
    return g_.either(std::move(options));
  }

  Node all_of(const OrderedJson& list, const OrderedJson& s, const std::string& path) {
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
  OrderedJson merged(const OrderedJson& s, int depth) {
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

  Node values(const OrderedJson& list, const OrderedJson& s, const std::string& path) {
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

  Node typed(const OrderedJson& s, const std::string& path) {
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
  Node of_type(const std::string& type, const OrderedJson& s, const std::string& path) {
    if (type == "object") return object(s, path);
    if (type == "array") return array(s, path);
    if (type == "string") return text(s, path);
    if (type == "integer" || type == "number") return numbers(s, path, type == "integer");
    if (type == "null") return g_.text("null", kEnd);
    return g_.either({g_.text("true", kEnd), g_.text("false", kEnd)});
  }

  // The listed properties in their order, then the properties that a schema in additionalProperties allows. There are
  // two chains of nodes: `first` for a still empty object, and `later`, which begins with a comma.
  Node object(const OrderedJson& s, const std::string& path) {
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
  std::pair<Node, Node> further(const OrderedJson& schema, const std::vector<std::string>& names, Node close,
                                const std::string& path) {
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
  std::set<std::string> required_of(const OrderedJson& s, const std::string& path) {
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

  int64_t count(const OrderedJson& s, const std::string& path, const char* key, int64_t otherwise, int64_t most) {
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
  std::pair<int64_t, int64_t> counts(const OrderedJson& s, const std::string& path, const char* low_key,
                                     const char* high_key, int64_t most) {
    const int64_t low = count(s, path, low_key, 0, most), high = count(s, path, high_key, -1, most);
    if (high < 0 || low <= high) return {low, high};
    if (exact_) refuse(path + "." + low_key, detail::concat("found more than ", high_key));
    return {0, -1};
  }
  Node array(const OrderedJson& s, const std::string& path) {
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

  Node text(const OrderedJson& s, const std::string& path) {
    const auto [low, high] = counts(s, path, "minLength", "maxLength", kMostLength);
    std::optional<Dfa> strings;
    const auto narrow = [&](const char* key, const auto& make) {
      held(path + "." + key, [&] {
        Dfa d = make();
        if (strings) d = intersect(*strings, d, budget_);
        if (d.states.empty()) fail(ErrorCode::usage, "found one that no string has");
        strings = std::move(d);
      });
    };
    if (const OrderedJson* pattern = find(s, "pattern")) {
      if (!pattern->is_string() && exact_) refuse(path + ".pattern", "expected a string");
      if (pattern->is_string()) narrow("pattern", [&] { return dfa_of_pattern(pattern->get<std::string>(), budget_); });
    }
    // Formats are enforced in exact mode only, because some authors of schemas mean something else by a format's name.
    if (const OrderedJson* format = find(s, "format"); format != nullptr && format->is_string() && exact_)
      if (const Dfa* dfa = dfa_of_format(format->get<std::string>())) narrow("format", [&] { return *dfa; });
    if (!strings) return any_text(low, high);
    if (low > 0 || high >= 0)
      held(path, [&, low = low, high = high] {  // clang before 16 does not capture the names of a structured binding
        Dfa d = intersect(*strings, strings_of_length(low, high), budget_);
        if (d.states.empty()) fail(ErrorCode::usage, "found no string of its length that has its pattern and format");
        strings = std::move(d);
      });
    const Node node = parts_.string_of(*strings, kEnd);
    check_size();
    return node;
  }
  Node any_text(int64_t low, int64_t high) {
    if (low == 0 && high < 0) return g_.call(parts_.text, kEnd);
    const Node close = parts_.mark('"', kEnd);
    Node rest = close;
    if (high < 0) {
      rest = g_.either({close});
      g_.add(rest, g_.call(parts_.character, rest));
    }
    for (int64_t i = high < 0 ? low : high; i > 0; --i) {
      const Node next = g_.call(parts_.character, rest);
      rest = i <= low ? next : g_.either({close, next});
    }
    return parts_.mark('"', rest);
  }

  Node numbers(const OrderedJson& s, const std::string& path, bool integers) {
    DecimalRange range{.integers = integers};
    const auto read = [&](const char* key, const auto& use) {
      const OrderedJson* value = find(s, key);
      if (value == nullptr) return;
      held(path + "." + key, [&] {
        if (!value->is_number()) fail(ErrorCode::usage, "expected a number");
        use(parse_decimal(write_json(*value)));
      });
    };
    // Of two bounds on one side the narrower counts; of two equal bounds the exclusive one counts.
    const auto bound = [&](std::optional<DecimalBound>& to, const char* closed, const char* open, bool low) {
      read(closed, [&](const Decimal& d) { to = {.value = d}; });
      read(open, [&](const Decimal& d) {
        const OrderedJson* other = to ? &s[closed] : nullptr;
        const double value = s[open].get<double>(), known = other == nullptr ? value : other->get<double>();
        if (low ? value >= known : value <= known) to = {.value = d, .open = true};
      });
    };
    bound(range.low, "minimum", "exclusiveMinimum", true);
    bound(range.high, "maximum", "exclusiveMaximum", false);
    read("multipleOf", [&](const Decimal& d) {
      if (d.negative || (d.whole.empty() && d.fraction.empty())) fail(ErrorCode::usage, "expected a number above 0");
      range.multiple = d;
    });
    Node node = g_.call(integers ? parts_.integer : parts_.number, kEnd);
    if (!range.low && !range.high && !range.multiple) return node;
    held(path, [&] {
      const Dfa d = dfa_of_decimals(range, budget_);
      if (d.states.empty())
        fail(ErrorCode::usage, "found no number of at most ", DecimalRange::kDigits, " digits within its bounds");
      node = parts_.number_of(d, kEnd);
      check_size();
    });
    return node;
  }

  Rule target(const OrderedJson& ref, const std::string& path) {
    const OrderedJson& place = place_of(root_, ref, path);
    return rule_of(place, where_ + ref.get<std::string>().substr(0, 80));
  }

  // Annotations do not affect validity; every other keyword must be among `allowed`.
  void only(const OrderedJson& s, const std::string& path, const std::vector<const char*>& allowed) {
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

  Grammar& g_;
  JsonParts parts_;
  const OrderedJson& root_;
  const std::string where_;
  const bool exact_;
  AutomatonBudget budget_;
  std::map<const OrderedJson*, Made> rules_;
  std::deque<OrderedJson> merged_;
};

constexpr JsonLimits kSchemaLimits = {.depth = 64, .bytes = 1 << 20};

}  // namespace

Grammar::Rule any_json(Grammar& grammar) { return JsonParts(grammar).any; }
Grammar::Rule any_json_object(Grammar& grammar) { return JsonParts(grammar).any_object; }

Grammar::Rule json_of_schema(Grammar& grammar, const std::string& schema, const std::string& where) {
  parse_json(schema, where, kSchemaLimits);  // the strict reader; the next line keeps the order of keys
  const OrderedJson root = OrderedJson::parse(schema);
  return Compiler(grammar, root, where, true).compile();
}

Grammar::Rule json_object_like_schema(Grammar& grammar, const std::string& schema) {
  try {
    parse_json(schema, "schema", kSchemaLimits);
    const OrderedJson root = OrderedJson::parse(schema);
    Grammar trial = grammar;  // a copy, so that a schema that is too large leaves no nodes in `grammar`
    const Rule rule = Compiler(trial, root, "schema", false).compile();
    GrammarWalk walk(trial, rule);
    bool is_object = true;
    for (int byte = 0; byte < 256; ++byte)
      if (byte != '{' && walk.next(walk.start(), byte) != GrammarWalk::kDead) is_object = false;
    if (is_object) {
      grammar = std::move(trial);
      return rule;
    }
  } catch (const Error&) {}
  return any_json_object(grammar);
}

}  // namespace ingot
