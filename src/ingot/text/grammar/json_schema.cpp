#include "ingot/text/grammar/json_schema.h"

#include <algorithm>
#include <map>
#include <set>

#include "ingot/io/json.h"

namespace ingot {
namespace {

using Node = Grammar::Node;
using Rule = Grammar::Rule;
using Set = Grammar::Set;
constexpr Node kEnd = Grammar::kEnd;

// --- JSON's own parts
// One character of a string, as UTF-8 (RFC 3629) or escaped. Half a surrogate pair is no character.
Rule character_rule(Grammar& g) {
  const Set tail = Grammar::range(0x80, 0xBF);
  const auto tails = [&](int n) {
    Node next = kEnd;
    for (int i = 0; i < n; ++i) next = g.one_of(tail, next);
    return next;
  };
  const auto lead = [&](int low, int high, int second_low, int second_high, int more) {
    return g.one_of(Grammar::range(low, high), g.one_of(Grammar::range(second_low, second_high), tails(more)));
  };
  const Set digits = Grammar::range('0', '9');
  const Set hex = digits | Grammar::range('a', 'f') | Grammar::range('A', 'F'), d = Grammar::bytes("dD");
  const auto four = [&](const Set& first, const Set& second, Node next) {
    return g.one_of(first, g.one_of(second, g.one_of(hex, g.one_of(hex, next))));
  };
  const Set low_half = Grammar::range('c', 'f') | Grammar::range('C', 'F');
  const Set high_half = Grammar::bytes("89abAB");
  const Node unicode = g.either({four(hex & ~d, hex, kEnd), four(d, Grammar::range('0', '7'), kEnd),
                                 four(d, high_half, g.text("\\u", four(d, low_half, kEnd)))});
  const Node escaped = g.either({g.one_of(Grammar::bytes("\"\\/bfnrt"), kEnd), g.one_of(Grammar::bytes("u"), unicode)});
  return g.rule(g.either(
      {g.one_of(Grammar::range(0x20, 0x7F) & ~Grammar::bytes("\"\\"), kEnd), g.one_of(Grammar::bytes("\\"), escaped),
       g.one_of(Grammar::range(0xC2, 0xDF), tails(1)), lead(0xE0, 0xE0, 0xA0, 0xBF, 1), lead(0xE1, 0xEC, 0x80, 0xBF, 1),
       lead(0xED, 0xED, 0x80, 0x9F, 1), lead(0xEE, 0xEF, 0x80, 0xBF, 1), lead(0xF0, 0xF0, 0x90, 0xBF, 2),
       lead(0xF1, 0xF3, 0x80, 0xBF, 2), lead(0xF4, 0xF4, 0x80, 0x8F, 2)}));
}

struct Parts {
  static constexpr int kDigits = 15;  // what a double keeps
  Rule character, text, integer, number, space, any = -1, any_object = -1;
  std::vector<Rule> anys;  // by how deep they may still nest

  explicit Parts(Grammar& g) {
    character = character_rule(g);
    const Node more = g.either({});
    g.add(more, g.one_of(Grammar::bytes("\""), kEnd));
    g.add(more, g.call(character, more));
    text = g.rule(g.one_of(Grammar::bytes("\""), more));
    const auto whole = [&](Node next) {
      const Node rest = g.one_of(Grammar::range('1', '9'), up_to(g, kDigits - 1, next));
      const Node number = g.either({g.one_of(Grammar::bytes("0"), next), rest});
      return g.either({number, g.one_of(Grammar::bytes("-"), number)});
    };
    integer = g.rule(whole(kEnd));
    const Node power = g.one_of(Grammar::range('1', '9'), up_to(g, 1, kEnd));
    const Node exponent = g.one_of(Grammar::bytes("eE"), g.either({power, g.one_of(Grammar::bytes("+-"), power)}));
    const Node tail = g.either({kEnd, exponent});
    const Node fraction =
        g.one_of(Grammar::bytes("."), g.one_of(Grammar::range('0', '9'), up_to(g, kDigits - 1, tail)));
    number = g.rule(whole(g.either({tail, fraction})));
    constexpr int kIndent = 32;
    Node indent = kEnd;
    for (int i = 0; i < kIndent; ++i) indent = g.either({kEnd, g.one_of(Grammar::bytes(" "), indent)});
    space = g.rule(g.either({kEnd, g.one_of(Grammar::bytes(" "), kEnd), g.one_of(Grammar::bytes("\n"), indent)}));
    for (int depth = 0; depth <= kJsonNesting; ++depth) add_any(g, depth);
    any = anys.back();
    any_object = g.rule(object(g, text, anys[size_t(kJsonNesting - 1)], kEnd));
  }
  // Up to so many digits more.
  static Node up_to(Grammar& g, int n, Node next) {
    const Set digit = Grammar::range('0', '9');
    Node after = next;
    for (int i = 0; i < n; ++i) after = g.either({next, g.one_of(digit, after)});
    return after;
  }
  Node mark(Grammar& g, char c, Node next) const { return g.one_of(Grammar::bytes({&c, 1}), next); }
  Node pair(Grammar& g, Rule key, Rule value, Node next) const {
    return g.call(key, mark(g, ':', g.call(space, g.call(value, next))));
  }
  // Of any length.
  Node object(Grammar& g, Rule key, Rule value, Node next) const {
    const Node close = g.call(space, mark(g, '}', next)), more = g.either({});
    const Node first = g.call(space, pair(g, key, value, more));
    g.add(more, close);
    g.add(more, mark(g, ',', first));
    return mark(g, '{', g.either({close, first}));
  }
  Node array(Grammar& g, Rule value, Node next) const {
    const Node close = g.call(space, mark(g, ']', next)), more = g.either({});
    const Node first = g.call(space, g.call(value, more));
    g.add(more, close);
    g.add(more, mark(g, ',', first));
    return mark(g, '[', g.either({close, first}));
  }
  void add_any(Grammar& g, int depth) {
    std::vector<Node> kinds = {g.call(text, kEnd), g.call(number, kEnd), g.text("true", kEnd), g.text("false", kEnd),
                               g.text("null", kEnd)};
    if (depth > 0) {
      kinds.push_back(object(g, text, anys.back(), kEnd));
      kinds.push_back(array(g, anys.back(), kEnd));
    }
    anys.push_back(g.rule(g.either(std::move(kinds))));
  }
};

// --- schemas
[[noreturn]] void refuse(const std::string& path, const std::string& what) { fail(ErrorCode::usage, path, ": ", what); }

class Compiler {
 public:
  Compiler(Grammar& g, const OrderedJson& root, const std::string& where)
      : g_(g), parts_(g), root_(root), where_(where) {}

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

  // Each place of the schema is one rule, however often it is referred to.
  Rule rule_of(const OrderedJson& schema, const std::string& path) {
    const auto [at, added] = rules_.try_emplace(&schema, Made{});
    if (!added) return at->second.rule;
    const Rule rule = g_.declare();
    at->second = {rule, path};
    if (g_.size() > kMostNodes) refuse(where_, "found too large a schema");
    g_.define(rule, body(schema, path));
    return rule;
  }

  Node body(const OrderedJson& s, const std::string& path) {
    if (s.is_boolean() && s.get<bool>()) return g_.call(parts_.any, kEnd);
    if (!s.is_object()) refuse(path, "found " + describe_json(Json(s)) + ", expected a schema");
    if (const OrderedJson* ref = find(s, "$ref")) return alone(s, path, "$ref"), g_.call(target(*ref, path), kEnd);
    if (const OrderedJson* any = find(s, "anyOf")) return alone(s, path, "anyOf"), any_of(*any, path);
    if (const OrderedJson* all = find(s, "allOf")) {
      alone(s, path, "allOf");
      if (!all->is_array() || all->size() != 1) refuse(path + ".allOf", "found more than one schema, expected one");
      return g_.call(rule_of((*all)[0], path + ".allOf[0]"), kEnd);
    }
    if (s.contains("const")) return only(s, path, {"const", "type"}), values(OrderedJson::array({s["const"]}), s, path);
    if (const OrderedJson* list = find(s, "enum")) return only(s, path, {"enum", "type"}), values(*list, s, path);
    return typed(s, path);
  }

  Node any_of(const OrderedJson& list, const std::string& path) {
    if (!list.is_array() || list.empty()) refuse(path + ".anyOf", "expected a list of schemas");
    std::vector<Node> options;
    for (size_t i = 0; i < list.size(); ++i)
      options.push_back(g_.call(rule_of(list[i], path + ".anyOf[" + std::to_string(i) + "]"), kEnd));
    return g_.either(std::move(options));
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
    if (g_.size() > kMostNodes) refuse(where_, "found too large a schema");
    return g_.either(std::move(options));
  }
  static bool is_of(const OrderedJson& value, const std::string& type) {
    if (type == "object") return value.is_object();
    if (type == "array") return value.is_array();
    if (type == "string") return value.is_string();
    if (type == "boolean") return value.is_boolean();
    if (type == "null") return value.is_null();
    if (type == "number") return value.is_number();
    return value.is_number_integer() ||
           (value.is_number_float() && value.get<double>() == double(int64_t(value.get<double>())));
  }

  std::vector<std::string> types_of(const OrderedJson& s, const std::string& path) {
    const OrderedJson* type = find(s, "type");
    if (type == nullptr) return {};
    std::vector<std::string> types;
    for (const OrderedJson& t : type->is_array() ? *type : OrderedJson::array({*type})) {
      static const std::set<std::string> known = {"object", "array", "string", "integer", "number", "boolean", "null"};
      if (!t.is_string() || known.count(t.get<std::string>()) == 0)
        refuse(path + ".type", "found " + describe_json(Json(t)) + ", expected a type of JSON");
      types.push_back(t.get<std::string>());
    }
    if (types.empty()) refuse(path + ".type", "found no type, expected at least one");
    return types;
  }

  Node typed(const OrderedJson& s, const std::string& path) {
    static const std::map<std::string, std::vector<const char*>> keywords = {
        {"object", {"properties", "required", "additionalProperties"}},
        {"array", {"items", "minItems", "maxItems"}},
        {"string", {"minLength", "maxLength"}}};
    std::vector<std::string> types = types_of(s, path);
    std::vector<const char*> allowed = {"type"};
    if (types.empty()) {  // what it speaks of says what it is
      for (const auto& [type, words] : keywords)
        for (const char* word : words)
          if (s.contains(word) && (types.empty() || types.back() != type)) types.push_back(type);
      if (types.size() > 1) refuse(path + ".type", "it is missing");
    }
    if (types.empty()) return only(s, path, allowed), g_.call(parts_.any, kEnd);
    std::vector<Node> options;
    for (const std::string& type : types)
      if (const auto of = keywords.find(type); of != keywords.end())
        allowed.insert(allowed.end(), of->second.begin(), of->second.end());
    only(s, path, allowed);
    for (const std::string& type : types) options.push_back(of_type(type, s, path));
    return g_.either(std::move(options));
  }
  Node of_type(const std::string& type, const OrderedJson& s, const std::string& path) {
    if (type == "object") return object(s, path);
    if (type == "array") return array(s, path);
    if (type == "string") return text(s, path);
    if (type == "integer") return g_.call(parts_.integer, kEnd);
    if (type == "number") return g_.call(parts_.number, kEnd);
    if (type == "null") return g_.text("null", kEnd);
    return g_.either({g_.text("true", kEnd), g_.text("false", kEnd)});
  }

  // Properties in their order. Two chains, by whether one came before: then a comma separates.
  Node object(const OrderedJson& s, const std::string& path) {
    static const OrderedJson none = OrderedJson::object();
    const OrderedJson* listed = find(s, "properties");
    const OrderedJson& properties = listed == nullptr ? none : *listed;
    if (!properties.is_object()) refuse(path + ".properties", "expected an object of schemas");
    const std::set<std::string> required = required_of(s, properties, path);
    const OrderedJson* more = find(s, "additionalProperties");
    const bool closed = more != nullptr && more->is_boolean() && !more->get<bool>();
    if (properties.empty() && !closed) {
      if (more == nullptr || more->is_boolean()) return g_.call(parts_.any_object, kEnd);
      return parts_.object(g_, parts_.text, rule_of(*more, path + ".additionalProperties"), kEnd);
    }
    if (more != nullptr && !more->is_boolean())
      refuse(path + ".additionalProperties", "found a schema beside properties, expected true or false");
    Node first = g_.call(parts_.space, parts_.mark(g_, '}', kEnd)), later = first;
    std::vector<const OrderedJson*> schemas;
    std::vector<std::string> names;
    for (const auto& [name, schema] : properties.items()) names.push_back(name), schemas.push_back(&schema);
    for (size_t i = names.size(); i-- > 0;) {
      const Rule value = rule_of(*schemas[i], path + ".properties." + names[i]);
      const Node key_text =
          g_.text(write_json(OrderedJson(names[i])) + ":", g_.call(parts_.space, g_.call(value, later)));
      const Node said = g_.call(parts_.space, key_text), next = parts_.mark(g_, ',', said);
      const bool needed = required.count(names[i]) != 0;
      // What stands before it decides on the comma; what follows it has something before it.
      const Node skipped_first = first, skipped_later = later;
      first = needed ? said : g_.either({said, skipped_first});
      later = needed ? next : g_.either({next, skipped_later});
    }
    return parts_.mark(g_, '{', first);
  }
  std::set<std::string> required_of(const OrderedJson& s, const OrderedJson& properties, const std::string& path) {
    std::set<std::string> required;
    const OrderedJson* list = find(s, "required");
    if (list == nullptr) return required;
    if (!list->is_array()) refuse(path + ".required", "expected a list of names");
    for (const OrderedJson& name : *list) {
      if (!name.is_string() || !properties.contains(name.get<std::string>()))
        refuse(path + ".required", "found " + describe_json(Json(name)) + ", expected a name in properties");
      required.insert(name.get<std::string>());
    }
    return required;
  }

  int64_t count(const OrderedJson& s, const std::string& path, const char* key, int64_t otherwise, int64_t most) {
    const OrderedJson* value = find(s, key);
    if (value == nullptr) return otherwise;
    const bool fits = value->is_number_integer() && value->get<int64_t>() >= 0 &&
                      (!value->is_number_unsigned() || value->get<uint64_t>() <= uint64_t(most)) &&
                      value->get<int64_t>() <= most;
    if (!fits) refuse(path + "." + key, detail::concat("expected an integer from 0 to ", most));
    return value->get<int64_t>();
  }
  Node array(const OrderedJson& s, const std::string& path) {
    const OrderedJson* items = find(s, "items");
    const Rule item = items == nullptr ? parts_.any : rule_of(*items, path + ".items");
    const int64_t low = count(s, path, "minItems", 0, kMostItems), high = count(s, path, "maxItems", -1, kMostItems);
    if (high >= 0 && low > high) refuse(path + ".minItems", "found more than maxItems");
    const Node close = g_.call(parts_.space, parts_.mark(g_, ']', kEnd));
    // After the last item that must be: any number more, or up to the most.
    Node rest = close;
    const auto one = [&](Node next) { return g_.call(parts_.space, g_.call(item, next)); };
    if (high < 0) {
      rest = g_.either({close});
      g_.add(rest, parts_.mark(g_, ',', one(rest)));
    }
    const int64_t chain = high < 0 ? std::max<int64_t>(low, 1) : high;  // items said one by one
    for (int64_t i = chain; i > 1; --i) {
      const Node next = parts_.mark(g_, ',', one(rest));
      rest = i <= low ? next : g_.either({close, next});
    }
    if (high == 0) return parts_.mark(g_, '[', close);
    const Node first = one(rest);
    return parts_.mark(g_, '[', low > 0 ? first : g_.either({close, first}));
  }
  Node text(const OrderedJson& s, const std::string& path) {
    const int64_t low = count(s, path, "minLength", 0, kMostLength),
                  high = count(s, path, "maxLength", -1, kMostLength);
    if (low == 0 && high < 0) return g_.call(parts_.text, kEnd);
    if (high >= 0 && low > high) refuse(path + ".minLength", "found more than maxLength");
    const Node close = parts_.mark(g_, '"', kEnd);
    Node rest = close;
    if (high < 0) {
      rest = g_.either({close});
      g_.add(rest, g_.call(parts_.character, rest));
    }
    for (int64_t i = high < 0 ? low : high; i > 0; --i) {
      const Node next = g_.call(parts_.character, rest);
      rest = i <= low ? next : g_.either({close, next});
    }
    return parts_.mark(g_, '"', rest);
  }

  // "#", or "#/" and the keys on the way, with ~0 and ~1 for ~ and /.
  Rule target(const OrderedJson& ref, const std::string& path) {
    const std::string text = ref.is_string() ? ref.get<std::string>() : "";
    if (text != "#" && !text.starts_with("#/"))
      refuse(path + ".$ref",
             "found " + describe_json(Json(ref)) + ", expected a place in this schema, such as #/$defs/name");
    const OrderedJson* at = &root_;
    for (size_t from = 2; from <= text.size() && text.size() > 1;) {
      const size_t to = std::min(text.find('/', from), text.size());
      std::string key;
      for (size_t i = from; i < to; ++i)
        if (text[i] == '~' && i + 1 < to)
          key += text[++i] == '1' ? '/' : '~';
        else
          key += text[i];
      if (!at->is_object() || !at->contains(key))
        refuse(path + ".$ref", "found nothing at '" + text.substr(0, 80) + "'");
      at = &(*at)[key];
      from = to + 1;
    }
    return rule_of(*at, where_ + text.substr(0, 80));
  }

  static const OrderedJson* find(const OrderedJson& s, const char* key) {
    const auto at = s.find(key);
    return at == s.end() ? nullptr : &*at;
  }
  void alone(const OrderedJson& s, const std::string& path, const char* key) { only(s, path, {key}); }
  // Annotations say nothing about what is valid; everything else must be among `allowed`.
  void only(const OrderedJson& s, const std::string& path, const std::vector<const char*>& allowed) {
    static const std::set<std::string> annotations = {"title",       "description", "default",  "examples",
                                                      "$schema",     "$id",         "$comment", "$defs",
                                                      "definitions", "deprecated",  "readOnly", "writeOnly"};
    for (const auto& [key, value] : s.items())
      if (annotations.count(key) == 0 && std::find(allowed.begin(), allowed.end(), key) == allowed.end())
        refuse(path + "." + key.substr(0, 40), "it is not supported here");
  }

  Grammar& g_;
  const Parts parts_;
  const OrderedJson& root_;
  const std::string where_;
  std::map<const OrderedJson*, Made> rules_;
};

}  // namespace

Grammar::Rule any_json(Grammar& grammar) { return Parts(grammar).any; }
Grammar::Rule any_json_object(Grammar& grammar) { return Parts(grammar).any_object; }

Grammar::Rule json_of_schema(Grammar& grammar, const std::string& schema, const std::string& where) {
  parse_json(schema, where, {.depth = 64, .bytes = 1 << 20});  // strict; what follows keeps the order of the keys
  const OrderedJson root = OrderedJson::parse(schema);
  return Compiler(grammar, root, where).compile();
}

}  // namespace ingot
