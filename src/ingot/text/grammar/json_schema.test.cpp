#include "ingot/text/grammar/json_schema.h"

#include <gtest/gtest.h>

#include "ingot/core/rng.h"
#include "ingot/io/json.h"
#include "ingot/testing/temporary_directory.h"

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

// Bytes drawn at random from what may follow. Ends when it may; after a while it prefers what closes.
std::string said(GrammarWalk& walk, Dice& dice, size_t patience) {
  std::string text;
  int32_t state = walk.start();
  while (true) {
    std::vector<int> may;
    for (int b = 0; b < 256; ++b)
      if (walk.next(state, b) != GrammarWalk::kDead) may.push_back(b);
    if (walk.complete(state) && (may.empty() || dice.one_in(3) || text.size() > patience)) return text;
    EXPECT_FALSE(may.empty()) << "a dead end after " << text;
    if (may.empty() || text.size() > 50 * patience) {
      ADD_FAILURE() << "no end of " << text;
      return "";
    }
    int byte = may[dice.below(may.size())];
    if (text.size() > patience)
      for (const char close : {'}', ']', '"'})
        for (const int b : may)
          if (b == close) byte = b;
    text += char(byte);
    state = walk.next(state, byte);
  }
}

// --- an independent reading of what a schema means
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
  if (v.is_string()) return bounded(characters(v.get<std::string>()), "minLength", "maxLength");
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

OrderedJson random_schema(Dice& dice, int depth) {
  OrderedJson s = OrderedJson::object();
  const uint64_t kind = dice.below(depth > 0 ? 11 : 7);
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
    if (dice.one_in(2)) s["additionalProperties"] = false;
  }
  return s;
}

// A value of a schema, by the schema alone.
OrderedJson random_value(const OrderedJson& s, Dice& dice, const OrderedJson& root, int depth = 8) {
  if (s.contains("$ref")) return random_value(root["$defs"]["shared"], dice, root, depth - 1);
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
  return object;
}

TEST(json_schema, what_random_schemas_allow_is_valid_json_of_them_and_their_values_are_allowed) {
  int64_t objects = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    Dice dice{seed};
    OrderedJson schema = random_schema(dice, 3);
    schema["$defs"]["shared"] = OrderedJson{{"type", "array"}, {"items", {{"type", "boolean"}}}, {"maxItems", 2}};
    const std::string text = write_json(schema);
    GrammarWalk walk = walk_of(text);
    const Json root = Json::parse(text);
    for (int i = 0; i < 8; ++i) {
      const std::string document = said(walk, dice, 40);
      const Json value = parse_json(document, "what was said");
      ASSERT_TRUE(valid(root, value, root)) << text << "\n" << document;
      objects += value.is_object();
    }
    for (int i = 0; i < 8; ++i) {
      const OrderedJson value = random_value(schema, dice, schema);
      ASSERT_TRUE(valid(root, Json::parse(value.dump()), root)) << text << "\n" << value;
      ASSERT_TRUE(accepts(walk, write_json(value))) << text << "\n" << write_json(value);
    }
  }
  EXPECT_GT(objects, 200);
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

TEST(json_schema, each_keyword_means_what_the_standard_says) {
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

TEST(json_schema, what_is_not_read_is_refused_by_name) {
  const auto refusal = [](const char* schema) { return error_of([&] { walk_of(schema); }); };
  EXPECT_EQ(refusal(R"({"type":"object","properties":{"a":{"type":"string","pattern":"^a*$"}}})"),
            "usage: schema.properties.a.pattern: it is not supported here");
  EXPECT_EQ(refusal(R"({"oneOf":[{"type":"null"}]})"), "usage: schema.oneOf: it is not supported here");
  EXPECT_EQ(refusal(R"({"type":"integer","minLength":1})"), "usage: schema.minLength: it is not supported here");
  EXPECT_EQ(refusal(R"({"anyOf":[{"type":"strin"}]})"),
            "usage: schema.anyOf[0].type: found string \"strin\", expected a type of JSON");
  EXPECT_EQ(refusal(R"({"$ref":"#"})"), "usage: schema: found a schema that no finite value has");
  EXPECT_EQ(refusal(R"({"properties":{"a":{"$ref":"#"}},"required":["a"]})"),
            "usage: schema.properties.a: found a schema that no finite value has");
  EXPECT_EQ(refusal(R"({"$ref":"#/$defs/none"})"), "usage: schema.$ref: found nothing at '#/$defs/none'");
  for (const char* bad : {R"({"$ref":"https://a.example/x"})",
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
                          R"({"required":["a"]})",
                          R"({"type":"object","required":"a"})",
                          R"({"properties":[]})",
                          R"({"type":"integer","enum":["a"]})",
                          "false",
                          "1",
                          "[]",
                          R"({"properties":{"a":true},"additionalProperties":{"type":"null"}})",
                          R"({"allOf":[true,true]})"})
    EXPECT_NE(refusal(bad), "") << bad;
}

// [[[... of a schema that both options read: their number doubles with each bracket unless it is bounded.
TEST(json_schema, a_text_that_can_be_read_in_too_many_ways_is_an_error_and_not_a_flood) {
  GrammarWalk walk = walk_of(
      R"({"anyOf":[{"type":"array","items":{"$ref":"#"},"minItems":1},{"type":"array","items":{"$ref":"#"}}]})");
  EXPECT_NE(error_of([&] { accepts(walk, std::string(5000, '[')); }), "");
}

}  // namespace
}  // namespace ingot
