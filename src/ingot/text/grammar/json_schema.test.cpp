#include "ingot/text/grammar/json_schema.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <regex>

#include "ingot/core/rng.h"
#include "ingot/io/json.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/text/utf8.h"

namespace ingot {
namespace {

using testing::error_of;

GrammarWalk walk_of(const std::string& schema) {
  Grammar g;
  const Grammar::Rule rule = json_of_schema(g, schema, "schema");
  return GrammarWalk(std::move(g), rule);
}
GrammarWalk walk_of_object() {
  Grammar g;
  const Grammar::Rule rule = any_json_object(g);
  return GrammarWalk(std::move(g), rule);
}
bool accepts(GrammarWalk& walk, std::string_view text) {
  int32_t state = walk.start();
  for (const char c : text)
    if ((state = walk.next(state, uint8_t(c))) == GrammarWalk::kDead) return false;
  return walk.complete(state);
}
void expect_accepts(const std::string& schema, const std::vector<const char*>& good,
                    const std::vector<const char*>& bad) {
  GrammarWalk walk = walk_of(schema);
  for (const char* text : good) EXPECT_TRUE(accepts(walk, text)) << schema << " " << text;
  for (const char* text : bad) EXPECT_FALSE(accepts(walk, text)) << schema << " " << text;
}

struct Dice {
  uint64_t seed;
  uint32_t step = 0;
  uint64_t below(uint64_t n) { return uint64_t(Rng(seed, Purpose::test, step++).uniform(0) * double(n)) % n; }
  bool one_in(uint64_t n) { return below(n) == 0; }
};

// Generates a text from random bytes among those that may follow. The text may end when the walk is complete; after
// `patience` bytes closing brackets and quotes are preferred. Returns an empty text where random bytes did not reach
// the end, for example for a pattern that needs one particular character.
std::string said(GrammarWalk& walk, Dice& dice, size_t patience) {
  std::string text;
  int32_t state = walk.start();
  while (true) {
    std::vector<int> may;
    for (int b = 0; b < 256; ++b)
      if (walk.next(state, b) != GrammarWalk::kDead) may.push_back(b);
    if (walk.complete(state) && (may.empty() || dice.one_in(3) || text.size() > patience)) return text;
    EXPECT_FALSE(may.empty()) << "a dead end after " << text;
    if (may.empty() || text.size() > 50 * patience) return "";
    int byte = may[dice.below(may.size())];
    // A string under a pattern may never end if every byte is a closing bracket.
    if (text.size() > patience && (text.size() < 4 * patience || dice.one_in(2)))
      for (const char close : {'}', ']', '"'})
        for (const int b : may)
          if (b == close) byte = b;
    text += char(byte);
    state = walk.next(state, byte);
  }
}

// --- an independent validator
std::wstring wide(
    const std::string& text) {  // one element per character, so that std::wregex reads the characters of UTF-8
  std::wstring out;
  for (size_t i = 0; i < text.size(); i += size_t(utf8_decode(text.data() + i).length))
    out += wchar_t(utf8_decode(text.data() + i).code);
  return out;
}
size_t characters(const std::string& s) {
  return size_t(std::count_if(s.begin(), s.end(), [](char c) { return (uint8_t(c) & 0xC0) != 0x80; }));
}
bool has_type(const Json& v, const std::string& type) {
  if (type == "integer") return v.is_number_integer();
  if (type == "number") return v.is_number();
  if (type == "object") return v.is_object();
  if (type == "array") return v.is_array();
  if (type == "string") return v.is_string();
  if (type == "boolean") return v.is_boolean();
  return v.is_null();
}
bool valid(const Json& s, const Json& v, const Json& root) {
  if (s.is_boolean()) return s.get<bool>();
  if (s.contains("$ref")) return valid(root.at(Json::json_pointer(s["$ref"].get<std::string>().substr(1))), v, root);
  if (s.contains("oneOf"))
    return std::count_if(s["oneOf"].begin(), s["oneOf"].end(), [&](const Json& o) { return valid(o, v, root); }) == 1;
  if (s.contains("anyOf"))
    return std::any_of(s["anyOf"].begin(), s["anyOf"].end(), [&](const Json& o) { return valid(o, v, root); });
  if (s.contains("enum")) return std::find(s["enum"].begin(), s["enum"].end(), v) != s["enum"].end();
  if (s.contains("const")) return s["const"] == v;
  if (s.contains("type")) {
    const Json types = s["type"].is_array() ? s["type"] : Json::array({s["type"]});
    if (std::none_of(types.begin(), types.end(), [&](const Json& t) { return has_type(v, t.get<std::string>()); }))
      return false;
  }
  const auto bounded = [&](size_t n, const char* low, const char* high) {
    return (!s.contains(low) || n >= s[low].get<size_t>()) && (!s.contains(high) || n <= s[high].get<size_t>());
  };
  if (v.is_string()) {
    const auto text = v.get<std::string>();
    if (s.contains("pattern") && !std::regex_search(wide(text), std::wregex(wide(s["pattern"].get<std::string>()))))
      return false;
    return bounded(characters(text), "minLength", "maxLength");
  }
  if (v.is_number()) {
    const auto number = v.get<double>();
    if (s.contains("minimum") && number < s["minimum"].get<double>()) return false;
    if (s.contains("exclusiveMinimum") && number <= s["exclusiveMinimum"].get<double>()) return false;
    if (s.contains("maximum") && number > s["maximum"].get<double>()) return false;
    if (s.contains("exclusiveMaximum") && number >= s["exclusiveMaximum"].get<double>()) return false;
    if (!s.contains("multipleOf")) return true;
    const double times = number / s["multipleOf"].get<double>();
    return std::abs(times - std::round(times)) < 1e-9 * std::max(1.0, std::abs(times));
  }
  if (v.is_array()) {
    for (const Json& item : v)
      if (s.contains("items") && !valid(s["items"], item, root)) return false;
    return bounded(v.size(), "minItems", "maxItems");
  }
  if (!v.is_object()) return true;
  if (s.contains("required"))
    for (const Json& name : s["required"])
      if (!v.contains(name.get<std::string>())) return false;
  for (const auto& [name, value] : v.items()) {
    if (s.contains("properties") && s["properties"].contains(name)) {
      if (!valid(s["properties"][name], value, root)) return false;
    } else if (s.contains("additionalProperties") && !valid(s["additionalProperties"], value, root)) {
      return false;
    }
  }
  return true;
}

// A pattern, and a text that the pattern matches from the first character to the last.
std::pair<std::string, std::string> random_pattern(Dice& dice, int depth) {
  const uint64_t kind = dice.below(depth > 0 ? 7 : 3);
  if (kind == 0) return {"[^b-d]", std::string(1, "ae-\"\n"[dice.below(5)])};
  if (kind == 1) return {"[a-c.]", std::string(1, "abc."[dice.below(4)])};
  if (kind == 2) return {"\\d", std::string(1, char('0' + dice.below(10)))};
  const auto [a, in_a] = random_pattern(dice, depth - 1);
  const auto [b, in_b] = random_pattern(dice, depth - 1);
  if (kind == 3) return {"(?:" + a + "|" + b + ")", dice.one_in(2) ? in_a : in_b};
  if (kind == 4) return {"(" + a + "){1,2}", in_a};
  if (kind == 5) return {"(?:" + a + ")*" + b, dice.one_in(2) ? in_b : in_a + in_b};
  return {a + b, in_a + in_b};
}

// A schema of one string or number, with a valid value as the annotation `example`.
OrderedJson random_narrow(Dice& dice) {
  OrderedJson s = OrderedJson::object();
  const uint64_t kind = dice.below(3);
  if (kind == 0) {
    const auto [pattern, text] = random_pattern(dice, 3);
    s["type"] = "string";
    s["pattern"] = (dice.one_in(2) ? "^" : "") + pattern + (dice.one_in(2) ? "$" : "");
    if (dice.one_in(2)) s["minLength"] = dice.below(text.size() + 1);
    if (dice.one_in(2)) s["maxLength"] = text.size() + dice.below(3);
    s["example"] = text;
  } else if (kind == 1) {
    const std::pair<const char*, const char*> formats[] = {
        {"date", "2023-11-30"},     {"time", "23:59:01.5Z"},      {"date-time", "2000-02-29T00:00:00-11:30"},
        {"email", "a.b@c-d.ef.gh"}, {"ipv4", "192.168.0.255"},    {"uuid", "00000000-ffff-4444-AAAA-0123456789ab"},
        {"uri", "urn:isbn:1"},      {"uri", "https://a.b/?c=%41"}};
    const auto& [format, text] = formats[dice.below(8)];
    s["type"] = "string";
    s["format"] = format;
    s["example"] = text;
  } else {
    const double unit[] = {1, 0.5, 0.01, 4};
    const double step = unit[dice.below(4)];
    const bool whole = step >= 1;
    const double count = double(dice.below(4000)) - 2000, value = step < 0.1 ? count / 100 : count * step;
    s["type"] = whole && dice.one_in(2) ? "integer" : "number";
    if (!dice.one_in(3)) s[dice.one_in(2) ? "minimum" : "exclusiveMinimum"] = value - double(1 + dice.below(300)) / 4;
    if (!dice.one_in(3)) s[dice.one_in(2) ? "maximum" : "exclusiveMaximum"] = value + double(1 + dice.below(300)) / 4;
    if (dice.one_in(2)) s["multipleOf"] = step;
    s["example"] = whole ? OrderedJson(int64_t(value)) : OrderedJson(value);
  }
  return s;
}

OrderedJson random_schema(Dice& dice, int depth) {
  OrderedJson s = OrderedJson::object();
  if (dice.one_in(4)) return random_narrow(dice);
  const uint64_t kind = dice.below(depth > 0 ? 12 : 7);
  const char* simple[] = {"string", "integer", "number", "boolean", "null"};
  if (kind < 4) {
    s["type"] = simple[dice.below(5)];
    if (s["type"] == "string" && dice.one_in(2)) s["minLength"] = dice.below(4), s["maxLength"] = 3 + dice.below(5);
    if (dice.one_in(4)) s["description"] = "what it is";
  } else if (kind == 4) {
    s["enum"] = OrderedJson::array({"a\"b", 1.5, nullptr, "\u65e5", OrderedJson{{"x", true}}});
  } else if (kind == 5) {
    s["type"] = OrderedJson::array({"null", simple[dice.below(4)]});
  } else if (kind == 6) {
    s["$ref"] = "#/$defs/shared";
  } else if (kind == 7) {
    s["anyOf"] = OrderedJson::array({random_schema(dice, depth - 1), random_schema(dice, depth - 1)});
  } else if (kind == 11) {
    s["oneOf"] = OrderedJson::array();
    for (const char* name : {"x", "y"}) {
      OrderedJson properties = {{"kind", {{"const", name}}}, {"of", random_schema(dice, depth - 1)}};
      s["oneOf"].push_back(
          {{"type", "object"}, {"properties", properties}, {"required", OrderedJson::array({"kind"})}});
    }
    s["oneOf"].push_back({{"type", "boolean"}});
  } else if (kind == 8) {
    s["type"] = "array";
    if (!dice.one_in(4)) s["items"] = random_schema(dice, depth - 1);
    if (dice.one_in(2)) s["minItems"] = dice.below(3);
    if (dice.one_in(2)) s["maxItems"] = 2 + dice.below(3);
  } else {
    s["type"] = "object";
    s["properties"] = OrderedJson::object();
    s["required"] = OrderedJson::array();
    for (uint64_t i = dice.below(5); i > 0; --i) {
      const std::string name = std::string(1, char('a' + dice.below(26))) + (dice.one_in(5) ? "\"\n" : "");
      s["properties"][name] = random_schema(dice, depth - 1);
      if (dice.one_in(2)) s["required"].push_back(name);
    }
    if (dice.one_in(2))
      s["additionalProperties"] = dice.one_in(2) ? OrderedJson(false) : random_schema(dice, depth - 1);
  }
  return s;
}

// A valid value, made from the schema without the grammar.
OrderedJson random_value(const OrderedJson& s, Dice& dice, const OrderedJson& root, int depth = 8) {
  if (s.contains("$ref")) return random_value(root["$defs"]["shared"], dice, root, depth - 1);
  if (s.contains("example")) return s["example"];
  if (s.contains("oneOf")) return random_value(s["oneOf"][dice.below(s["oneOf"].size())], dice, root, depth);
  if (s.contains("const")) return s["const"];
  if (s.contains("anyOf")) return random_value(s["anyOf"][dice.below(s["anyOf"].size())], dice, root, depth);
  if (s.contains("enum")) return s["enum"][dice.below(s["enum"].size())];
  std::string type = "null";
  if (s.contains("type"))
    type = s["type"].is_array() ? s["type"][dice.below(s["type"].size())].get<std::string>()
                                : s["type"].get<std::string>();
  if (type == "integer") return int64_t(dice.below(1u << 30)) - (1 << 29);
  if (type == "number") return double(int64_t(dice.below(1u << 20)) - (1 << 19)) / 64;
  if (type == "boolean") return dice.one_in(2);
  if (type == "string") {
    const size_t low = s.value("minLength", 0), high = s.value("maxLength", 6);
    std::string text;
    const char* pieces[] = {"a", "\"", "\\", "\u00e9", "\U0001f600", "\n", "/", "\x7f", "\ud7ff", "\uffff"};
    for (size_t n = low + dice.below(high - low + 1); n > 0; --n) text += pieces[dice.below(10)];
    return text;
  }
  if (type == "array") {
    OrderedJson list = OrderedJson::array();
    const size_t low = s.value("minItems", 0), high = s.value("maxItems", 3);
    for (size_t n = low + dice.below(high - low + 1); n > 0; --n)
      list.push_back(s.contains("items") ? random_value(s["items"], dice, root, depth - 1) : OrderedJson(true));
    return list;
  }
  if (type != "object") return nullptr;
  OrderedJson object = OrderedJson::object();
  for (const auto& [name, schema] : s["properties"].items()) {
    const bool needed = std::find(s["required"].begin(), s["required"].end(), name) != s["required"].end();
    if (needed || dice.one_in(2)) object[name] = random_value(schema, dice, root, depth - 1);
  }
  if (s.contains("additionalProperties") && s["additionalProperties"].is_object() && dice.one_in(2))
    object["another"] = random_value(s["additionalProperties"], dice, root, depth - 1);
  return object;
}

TEST(json_schema, texts_of_random_schemas_are_valid_and_valid_values_are_accepted) {
  int64_t objects = 0, endless = 0;
  std::ofstream documents;  // tests/schema_test.py validates the documents with another program
  if (const char* path = std::getenv("INGOT_SCHEMA_DOCUMENTS")) documents.open(path);
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Dice dice{seed};
    OrderedJson schema = random_schema(dice, 3);
    schema["$defs"]["shared"] = OrderedJson{{"type", "array"}, {"items", {{"type", "boolean"}}}, {"maxItems", 2}};
    const std::string text = write_json(schema);
    GrammarWalk walk = walk_of(text);
    const Json root = Json::parse(text);
    for (int i = 0; i < 8; ++i) {
      const std::string document = said(walk, dice, 40);
      endless += document.empty();
      if (document.empty()) continue;
      const Json value = parse_json(document, "what was said");
      ASSERT_TRUE(valid(root, value, root)) << text << "\n" << document;
      documents << write_json(OrderedJson{{"schema", schema}, {"document", document}}) << "\n";
      objects += value.is_object();
    }
    for (int i = 0; i < 8; ++i) {
      const OrderedJson value = random_value(schema, dice, schema);
      ASSERT_TRUE(valid(root, Json::parse(value.dump()), root)) << text << "\n" << value;
      ASSERT_TRUE(accepts(walk, write_json(value))) << text << "\n" << write_json(value);
    }
  }
  EXPECT_GT(objects, 200);
  EXPECT_LT(endless, 100);
}

TEST(json_schema, any_object_is_json_and_nothing_else_is) {
  GrammarWalk walk = walk_of_object();
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Dice dice{seed};
    EXPECT_TRUE(parse_json(said(walk, dice, 60), "what was said").is_object());
  }
  for (const char* good : {"{}", R"({"a":1})", R"({"a": [1, -0.5e-7, "\u00e9\ud83d\ude00", {"b": null}], "c": "é日😀"})",
                           "{\n  \"a\": true,\n  \"b\": []\n}", R"({"a":{"a":{}}})"})
    EXPECT_TRUE(accepts(walk, good)) << good;
  for (const char* bad : {"",
                          "[]",
                          "1",
                          "{",
                          "{}}",
                          R"({"a"})",
                          R"({"a":1,})",
                          R"({,})",
                          R"({a:1})",
                          R"({"a":01})",
                          R"({"a":1.})",
                          R"({"a":.5})",
                          R"({"a":+1})",
                          R"({"a":NaN})",
                          R"({"a":"\ud800"})",
                          R"({"a":"\udc00"})",
                          R"({"a":"\x"})",
                          "{\"a\":\"\n\"}",
                          "{\"a\":\"\xc0\x80\"}",
                          "{\"a\":\"\xed\xa0\x80\"}",
                          "{\"a\":\"\xf4\x90\x80\x80\"}",
                          R"({"a":'b'})",
                          R"({"a":1 "b":2})"})
    EXPECT_FALSE(accepts(walk, bad)) << bad;
  std::string deep;
  for (int i = 0; i < kJsonNesting; ++i) deep += i == 0 ? "{\"a\":" : "[";
  const std::string closed = std::string(kJsonNesting - 1, ']') + "}";
  EXPECT_TRUE(accepts(walk, deep + "1" + closed));
  EXPECT_FALSE(accepts(walk, deep + "[]" + closed));
}

TEST(json_schema, each_keyword_has_the_meaning_of_the_standard) {
  expect_accepts(R"({"type":"integer"})", {"0", "-7", "123456789012345"},
                 {"01", "1.0", "1e3", "1234567890123456", "\"1\"", "-"});
  expect_accepts(R"({"type":["string","null"],"maxLength":2})", {"null", "\"\"", "\"日本\"", R"("\n\u00e9")"},
                 {"\"abc\"", "1"});
  expect_accepts(R"({"type":"array","items":{"type":"boolean"},"minItems":1,"maxItems":2})",
                 {"[true]", "[true, false]"}, {"[]", "[true,true,true]", "[1]", "[true,]"});
  expect_accepts(R"({"type":"array","maxItems":0})", {"[]"}, {"[1]"});
  expect_accepts(R"({"properties":{"a":{"type":"null"},"b":true,"c":{"type":"null"}},"required":["b"]})",
                 {R"({"b":1})", R"({"a":null,"b":[{}]})", R"({"a": null, "b": "", "c": null})"},
                 {"{}", R"({"a":null})", R"({"b":1,"a":null})", R"({"b":1,"d":2})", R"({,"b":1})", R"({"b":1,})"});
  expect_accepts(R"({"type":"object","additionalProperties":{"type":"integer"}})", {"{}", R"({"x":1,"y":2})"},
                 {R"({"x":"1"})"});
  expect_accepts(R"({"type":"object","properties":{},"additionalProperties":false})", {"{}"}, {R"({"x":1})"});
  expect_accepts(R"({"type":"string","enum":["a",1,"b"]})", {"\"a\"", "\"b\""}, {"1", "\"c\"", "\"a"});
  expect_accepts(R"({"const":{"b":[1,null],"a":"x"}})", {R"({"b":[1,null],"a":"x"})"}, {R"({"a":"x","b":[1,null]})"});
  expect_accepts(R"({"allOf":[{"$ref":"#/definitions/x~1y"}],"definitions":{"x/y":{"type":"null"}}})", {"null"}, {"1"});
  expect_accepts(
      R"({"type":"object","properties":{"next":{"anyOf":[{"$ref":"#"},{"type":"null"}]}},"required":["next"]})",
      {R"({"next":null})", R"({"next":{"next":{"next":null}}})"}, {"{}", R"({"next":{"next":1}})"});
}

TEST(json_schema, bounds_of_numbers_are_enforced_exactly) {
  expect_accepts(R"({"type":"integer","minimum":-3,"maximum":12})", {"-3", "0", "9", "10", "12", "-0"},
                 {"-4", "13", "00", "1.0", "123", "-10"});
  expect_accepts(R"({"type":"integer","exclusiveMinimum":0})", {"1", "10", "999999999999999"}, {"0", "-0", "-1"});
  expect_accepts(R"({"type":"integer","exclusiveMaximum":-5})", {"-6", "-10"}, {"-5", "-4", "5", "0"});
  expect_accepts(R"({"type":"integer","minimum":0.5,"maximum":2.5})", {"1", "2"}, {"0", "3"});
  expect_accepts(R"({"type":"number","minimum":-0.25,"exclusiveMaximum":1})",
                 {"-0.25", "-0.2", "0", "0.999", "0.0", "-0.250"},
                 {"1", "1.0", "-0.26", "-1", "1e-3", "0.2500000000000000"});
  expect_accepts(R"({"type":"number","minimum":1,"exclusiveMinimum":1})", {"1.5", "1.01"}, {"1", "1.0", "1.00"});
  expect_accepts(R"({"type":"number","maximum":99.5})", {"99.5", "99.50", "99", "-1000", "9"}, {"99.51", "100"});
  expect_accepts(R"({"type":"integer","multipleOf":7,"minimum":10})", {"14", "21", "700"}, {"7", "0", "15", "-14"});
  expect_accepts(R"({"type":"number","multipleOf":0.25})", {"0", "0.5", "-1.75", "3", "2.0"}, {"0.3", "1.125"});
  expect_accepts(R"({"type":"number","multipleOf":0.01,"maximum":5})", {"4.99", "5", "-0.1"}, {"4.999", "5.01"});
  expect_accepts(R"({"type":["integer","null"],"minimum":1,"maximum":1})", {"1", "null"}, {"2"});
}

TEST(json_schema, a_pattern_matches_anywhere_in_the_text_and_escapes_are_written_where_json_requires_them) {
  expect_accepts(R"({"type":"string","pattern":"^[a-z]+$"})", {"\"a\"", "\"abc\""},
                 {"\"\"", "\"A\"", "\"a b\"", "\"a\\n\"", "a"});
  expect_accepts(R"({"pattern":"b"})", {"\"b\"", "\"abc\"", "\"\u65e5b\"", R"("\"b\n")"}, {"\"ac\"", "\"\""});
  expect_accepts(R"({"type":"string","pattern":"^\\d{3}-\\w?$"})", {"\"123-\"", "\"123-a\""},
                 {"\"12-\"", "\"1234-\"", "\"123-ab\""});
  expect_accepts(R"({"type":"string","pattern":"^(?:ab|c)*?d{2,}$"})", {"\"dd\"", "\"abcddd\""},
                 {"\"abd\"", "\"add\""});
  expect_accepts(R"({"type":"string","pattern":"^[^a-y\\s]$"})", {"\"z\"", "\"\u00e9\"", R"("\"")"},
                 {"\"a\"", "\" \"", "\"\u00a0\"", R"("\n")"});
  expect_accepts(R"({"type":"string","pattern":"^.\\.$"})", {"\"a.\"", "\"\U0001f600.\"", R"("\t.")", R"("\\.")"},
                 {R"("\n.")", "\"ab\""});
  expect_accepts(R"({"type":"string","pattern":"^a|b$"})", {"\"ax\"", "\"xb\""}, {"\"xa\"", "\"bx\""});
  expect_accepts(R"({"type":"string","pattern":"^\\u00e9\\x41\\/$"})", {"\"\u00e9A/\""}, {"\"eA/\""});
  expect_accepts(R"({"type":"string","pattern":"^[ab]+$","minLength":2,"maxLength":3})", {"\"ab\"", "\"aba\""},
                 {"\"a\"", "\"abab\""});
  expect_accepts(R"({"type":"string","pattern":"^[\\u0080-\\uffff]$"})",
                 {"\"\u0080\"", "\"\u07ff\"", "\"\u0800\"", "\"\ud7ff\"", "\"\ue000\"", "\"\uffff\""},
                 {"\"\x7f\"", "\"\U00010000\"", "\"\xed\xa0\x80\""});
  expect_accepts(R"({"type":"string","pattern":"^[\\u{10000}-\\u{10ffff}]$"})",
                 {"\"\U00010000\"", "\"\U0010ffff\"", "\"\U0001f600\""}, {"\"\uffff\"", "\"\xf4\x90\x80\x80\""});
}

TEST(json_schema, formats_accept_the_texts_of_their_standards) {
  expect_accepts(
      R"({"type":"string","format":"date"})", {"\"2024-02-29\"", "\"2000-02-29\"", "\"1999-12-31\"", "\"0001-01-01\""},
      {"\"2023-02-29\"", "\"1900-02-29\"", "\"2023-04-31\"", "\"2023-13-01\"", "\"0000-01-01\"", "\"23-01-01\""});
  expect_accepts(R"({"type":"string","format":"date-time"})",
                 {"\"2024-02-29T23:59:59Z\"", "\"2024-01-01T00:00:00.123+02:00\""},
                 {"\"2024-02-29\"", "\"2024-02-29T24:00:00Z\"", "\"2024-02-29T23:59:59\"", "\"2024-02-30T00:00:00Z\""});
  expect_accepts(R"({"type":"string","format":"time"})", {"\"12:30:00Z\""}, {"\"12:30\"", "\"12:60:00Z\""});
  expect_accepts(R"({"type":"string","format":"uuid"})", {"\"123e4567-E89B-12d3-a456-426614174000\""},
                 {"\"123e4567e89b12d3a456426614174000\""});
  expect_accepts(R"({"type":"string","format":"email"})", {"\"a.b+c@example.co.uk\""},
                 {"\"a@b\"", "\"a..b@c.de\"", "\"a b@c.de\"", "\"@c.de\""});
  expect_accepts(R"({"type":"string","format":"ipv4"})", {"\"255.0.10.99\""},
                 {"\"256.1.1.1\"", "\"1.1.1\"", "\"01.1.1.1\""});
  expect_accepts(R"({"type":"string","format":"uri"})",
                 {"\"https://a.example/b/c?d=e#f\"", "\"mailto:a@b.c\"", "\"http://localhost:80\""},
                 {"\"a.example\"", "\"http://a b\"", "\"://a\"", "\"http://\u00e9\""});
  expect_accepts(R"({"type":"string","format":"phone"})", {"\"anything\""}, {"1"});
  expect_accepts(R"({"type":"integer","format":"int32"})", {"1"}, {"\"a\""});
  expect_accepts(R"({"format":"date"})", {"\"2024-02-29\""}, {"1"});
  expect_accepts(R"({"type":"string","format":"date","pattern":"^20","maxLength":10})", {"\"2024-02-29\""},
                 {"\"1999-01-01\""});
}

TEST(json_schema, alternatives_of_one_of_are_distinguished_by_type_or_by_a_required_property) {
  expect_accepts(R"({"oneOf":[{"type":"string"},{"type":"null"},{"enum":[1,2]}]})", {"\"a\"", "null", "2"},
                 {"3", "true"});
  expect_accepts(R"({"oneOf":[{"$ref":"#/$defs/a"},{"$ref":"#/$defs/b"}],"discriminator":{"propertyName":"k"},"$defs":{
      "a":{"type":"object","properties":{"k":{"const":"a"},"x":{"type":"null"}},"required":["k"]},
      "b":{"type":"object","properties":{"k":{"enum":["b","c"]}},"required":["k"]}}})",
                 {R"({"k":"a","x":null})", R"({"k":"c"})"}, {R"({"k":"b","x":null})", R"({"k":"d"})"});
  expect_accepts(
      R"({"oneOf":[{"type":"object","properties":{"a":{"type":"null"}},"required":["a"],"additionalProperties":false},
      {"type":"object","properties":{"b":{"type":"null"}},"required":["b"],"additionalProperties":false}]})",
      {R"({"a":null})", R"({"b":null})"}, {"{}", R"({"a":null,"b":null})"});
}

TEST(json_schema, further_properties_have_unlisted_names_and_the_schema_of_additional_properties) {
  expect_accepts(R"({"type":"object","properties":{"ab":{"type":"null"}},"additionalProperties":{"type":"integer"}})",
                 {"{}", R"({"ab":null})", R"({"a":1,"abc":2,"":3})", R"({"ab":null,"b":1})"},
                 {R"({"ab":1})", R"({"b":null})", R"({"b":1,"ab":null})", R"({,"b":1})"});
  expect_accepts(R"({"type":"object","properties":{"a":{"type":"null"}},"required":["b"]})",
                 {R"({"b":[1]})", R"({"a":null,"b":2})"}, {"{}", R"({"a":null})"});
}

// The schemas of forced calls without "strict".
TEST(json_schema, lenient_schemas_enforce_every_expressible_keyword_and_refuse_nothing) {
  const auto held = [](const std::string& schema, const std::vector<const char*>& good,
                       const std::vector<const char*>& bad) {
    Grammar g;
    const Grammar::Rule rule = json_object_like_schema(g, schema);
    GrammarWalk walk(std::move(g), rule);
    for (const char* text : good) EXPECT_TRUE(accepts(walk, text)) << schema << " " << text;
    for (const char* text : bad) EXPECT_FALSE(accepts(walk, text)) << schema << " " << text;
  };
  const auto of = [](const std::string& a) {
    return R"({"type":"object","properties":{"a":)" + a + R"(},"required":["a"]})";
  };
  held(of(R"({"type":"integer","minimum":0,"maximum":5})"), {R"({"a":5})"}, {R"({"a":6})", R"({"a":"x"})", "{}", "[]"});
  held(of(R"({"type":"string","pattern":"^(?!\\.).+@.+$","format":"email"})"), {R"({"a":"x"})"}, {R"({"a":1})"});
  held(of(R"({"type":"string","format":"date-time"})"), {R"({"a":"tomorrow"})"}, {R"({"a":1})"});
  held(of(R"({"oneOf":[{"type":"string"},{"type":"string"}]})"), {R"({"a":"x"})"}, {R"({"a":1})"});
  held(of(R"({"type":"array","prefixItems":[{"type":"string"}],"uniqueItems":true,"maxItems":1000})"),
       {R"({"a":[1,"b"]})"}, {R"({"a":1})"});
  held(of(R"({"type":"string","maxLength":10000,"nullable":true})"), {R"({"a":"x"})"}, {R"({"a":null})"});
  held(of(R"({"type":"integer","enum":["x"]})"), {R"({"a":7})"}, {R"({"a":"x"})"});
  held(of(R"({"type":"integer","minimum":5,"maximum":4})"), {R"({"a":7})"}, {R"({"a":"x"})"});
  held(of(R"({"type":"quaternion"})"), {R"({"a":7})", R"({"a":"x"})"}, {"{}"});
  held(of(R"({"$ref":"https://a.example/x"})"), {R"({"a":7})"}, {"{}"});
  held(of(R"({"allOf":[{"type":"object","properties":{"x":{"type":"string"}},"required":["x"]},
      {"type":"object","properties":{"y":{"type":"null"}},"required":["y"]}],"description":"d"})"),
       {R"({"a":{"x":"","y":null}})"}, {R"({"a":{"x":""}})", R"({"a":{"y":null}})"});
  held(of("false"), {R"({"a":7})"}, {"{}"});
  held(of(R"({"if":{},"then":{},"type":"boolean"})"), {R"({"a":true})"}, {R"({"a":1})"});
  held(
      R"({"type":"object","properties":{"a":{"type":"null"},"b":{"type":"null"}},"anyOf":[{"required":["a"]},{"required":["b"]}]})",
      {R"({"a":null})", "{}"}, {R"({"a":1})"});
  held(R"({"type":"object","propertyNames":{"pattern":"^x"},"additionalProperties":{"type":"string"}})",
       {R"({"x":"a"})"}, {R"({"x":1})"});
  held(R"({"type":"object","properties":{"a":{"type":"null"}},"required":["a","b"]})", {R"({"a":null,"b":1})"},
       {R"({"a":null})"});
  for (const char* nothing : {"{}", "true", "[]", R"({"type":"string"})", R"({"$ref":"#"})", "no JSON",
                              R"({"properties":{"a":{"$ref":"#"}},"required":["a"]})", R"({"type":["object","null"]})",
                              R"({"allOf":[{"$ref":"#"},{}]})"})
    held(nothing, {"{}", R"({"any":[1]})"}, {"[]", "1"});
}

TEST(json_schema, patterns_and_schemas_that_cost_too_much_are_refused_in_time) {
  for (const char* costly :
       {R"({"type":"string","pattern":"(a|b)*a(a|b){40}"})", R"({"type":"string","pattern":"((a{99}){99}){99}"})",
        R"({"type":"string","pattern":"a{9999}b{9999}c{9999}"})", R"({"type":"string","pattern":"\\W{9999}"})",
        R"({"type":"number","multipleOf":99.991})",
        R"({"type":"string","pattern":"((((a*)*)*)*)*(((b?){99}){99}){9}"})"})
    EXPECT_NE(error_of([&] { walk_of(costly); }), "") << costly;
}

TEST(json_schema, unsupported_keywords_and_values_are_refused_by_name) {
  const auto refusal = [](const char* schema) { return error_of([&] { walk_of(schema); }); };
  EXPECT_EQ(refusal(R"x({"type":"object","properties":{"a":{"type":"string","pattern":"^(?=a)"}}})x"),
            "usage: schema.properties.a.pattern: character 2: a lookaround or a flag is not supported");
  EXPECT_EQ(refusal(R"({"type":"array","uniqueItems":true})"), "usage: schema.uniqueItems: it is not supported here");
  EXPECT_EQ(
      refusal(R"({"oneOf":[{"type":"null"},{"type":"integer"},{"type":"number"}]})"),
      "usage: schema.oneOf: found alternatives 1 and 2 that one value may have, expected them to differ in type or "
      "in const or enum of a required property");
  EXPECT_EQ(refusal(R"({"type":"integer","minLength":1})"), "usage: schema.minLength: it is not supported here");
  EXPECT_EQ(refusal(R"({"anyOf":[{"type":"strin"}]})"),
            "usage: schema.anyOf[0].type: found string \"strin\", expected one of object, array, string, number, "
            "integer, boolean, null");
  EXPECT_EQ(refusal(R"({"$ref":"#"})"), "usage: schema: found a schema that no finite value has");
  EXPECT_EQ(refusal(R"({"properties":{"a":{"$ref":"#"}},"required":["a"]})"),
            "usage: schema.properties.a: found a schema that no finite value has");
  EXPECT_EQ(refusal(R"({"$ref":"#/$defs/none"})"), "usage: schema.$ref: found nothing at '#/$defs/none'");
  for (
      const char* bad :
      {R"({"$ref":"https://a.example/x"})",
       R"({"$ref":1})",
       R"({"enum":[]})",
       R"({"enum":1})",
       R"({"anyOf":[]})",
       R"({"type":[]})",
       R"({"type":"array","minItems":-1})",
       R"({"type":"array","maxItems":257})",
       R"({"type":"array","minItems":2,"maxItems":1})",
       R"({"type":"string","maxLength":1025})",
       R"({"type":"string","minLength":18446744073709551615})",
       R"({"required":["a"],"additionalProperties":false})",
       R"({"type":"object","required":"a"})",
       R"({"type":"string","pattern":1})",
       R"({"type":"string","pattern":"^a$","minLength":2})",
       R"({"type":"string","pattern":"a$b"})",
       R"({"type":"string","format":1})",
       R"({"type":"integer","minimum":"1"})",
       R"({"type":"integer","minimum":5,"maximum":4})",
       R"({"type":"number","exclusiveMinimum":1,"maximum":1})",
       R"({"type":"integer","exclusiveMinimum":1,"exclusiveMaximum":2})",
       R"({"type":"integer","minimum":1e20})",
       R"({"type":"integer","multipleOf":0})",
       R"({"type":"integer","multipleOf":99991})",
       R"({"type":"string","minimum":1})",
       R"({"oneOf":[{"type":"object","properties":{"a":{"const":1}}},{"type":"object","properties":{"a":{"const":2}}}]})",
       R"({"oneOf":[{"properties":{"a":{"type":"null"}}},{"type":"object"}]})",
       R"({"oneOf":[]})",
       R"({"properties":[]})",
       R"({"type":"integer","enum":["a"]})",
       "false",
       "1",
       "[]",
       R"({"allOf":[true,true]})"})
    EXPECT_NE(refusal(bad), "") << bad;
}

// Both alternatives accept [[[...: the number of possible readings doubles with each bracket.
TEST(json_schema, a_text_with_too_many_readings_is_an_error) {
  GrammarWalk walk = walk_of(
      R"({"anyOf":[{"type":"array","items":{"$ref":"#"},"minItems":1},{"type":"array","items":{"$ref":"#"}}]})");
  EXPECT_NE(error_of([&] { accepts(walk, std::string(5000, '[')); }), "");
}

}  // namespace
}  // namespace ingot
