#include "ingot/io/json.h"

#include <gtest/gtest.h>

#include "ingot/testing/temporary_directory.h"

namespace ingot {
namespace {

using namespace std::string_literals;
using testing::error_of;

std::string refusal(const std::string& text) {
  return error_of([&] { parse_json(text, "f.json"); });
}

TEST(json, valid_documents_round_trip) {
  for (const char* text :
       {"null", "true", " [ ] ", "{}", "{\"a\":[1,-2,3.5,\"x\"],\"b\":{\"c\":null}}", "18446744073709551615",
        "-9223372036854775808", "\"\\ud83d\\ude00\"", "\"\\u0000\"", "1e308", "[[[[]]]]", "-0", "0.1"}) {
    const Json value = parse_json(text, "t");
    EXPECT_EQ(parse_json(write_json(value), "t"), value) << text;
  }
}

TEST(json, text_that_is_not_strict_json_is_refused) {
  const std::string cases[] = {"",
                               " ",
                               "{",
                               "[1,]",
                               "[1 2]",
                               "{\"a\":1,}",
                               "{a:1}",
                               "nul",
                               "NaN",
                               "[Infinity]",
                               "-",
                               "01",
                               "1.",
                               ".5",
                               "+1",
                               "0x10",
                               "1e999",
                               "-1e999",
                               "\"abc",
                               "\"\\x\"",
                               "\"\\ud800\"",
                               "\"\\ud800\\u0041\"",
                               "\"\\udc00\"",
                               "\"\xC0\x80\"",
                               "\"\xED\xA0\x80\"",
                               "\"a\nb\"",
                               "\"\x01\"",
                               "{} x",
                               "[]]",
                               "\xEF\xBB\xBF{}",
                               "// c\n{}",
                               "/**/1",
                               "{\"a\":1,\"a\":2}",
                               "'a'",
                               "[1]\0"s,
                               "{}\0{}"s,
                               "\0"s,
                               "18446744073709551616",
                               "-9223372036854775809",
                               "[" + std::string(400, '9') + "]",
                               "{\"a\" 1}",
                               "[,1]",
                               "\xFF"};
  for (const std::string& text : cases) EXPECT_NE(refusal(text), "") << text;
}

TEST(json, messages_name_the_file_the_byte_and_the_value_found) {
  EXPECT_EQ(refusal("{\"a\": 1, \"a\": 2}"), "bad data: f.json: byte 12: found duplicate key \"a\"");
  EXPECT_NE(refusal("[1, nul]").find("bad data: f.json: byte 7: "), std::string::npos) << refusal("[1, nul]");
  EXPECT_NE(refusal("[1, 123456789012345678901]").find("found integer 123456789012345678901, expected one of 64 bits"),
            std::string::npos);
  // In words of ours alone, whatever the parser's are.
  EXPECT_EQ(refusal("[1e400]").find("json.exception"), std::string::npos);
  EXPECT_NE(refusal("[1e400]").find(": number overflow parsing '1e400'"), std::string::npos);
}

TEST(json, nesting_and_size_are_bounded) {
  EXPECT_EQ(refusal(std::string(64, '[') + std::string(64, ']')), "");
  EXPECT_NE(refusal(std::string(65, '[') + std::string(65, ']')).find("nesting deeper than 64"), std::string::npos);
  std::string objects;
  for (int i = 0; i < 100000; ++i) objects += "{\"a\":";
  EXPECT_NE(refusal(objects), "");
  EXPECT_NE(refusal(std::string(1000000, '[')), "");
  EXPECT_NE(error_of([] { parse_json("[1, 2, 3]", "f", {.depth = 4, .bytes = 8}); }), "");
}

TEST(json, every_prefix_of_a_document_is_refused) {
  const std::string text = "{\"a\":[1,-2.5e3,true,\"\\u00e9\"],\"b\":{}}";
  for (size_t n = 0; n < text.size(); ++n) EXPECT_NE(refusal(text.substr(0, n)), "") << n;
}

TEST(json, nan_cannot_be_written) {
  EXPECT_THROW(write_json(Json{{"x", std::nan("")}}), Error);
  EXPECT_THROW(write_json(Json("\xFF")), Error);
}

TEST(fields, values_are_read_by_type_and_defaults_stay) {
  const Json json = parse_json(R"({"n": 7, "x": 2, "s": "t", "b": true, "l": [1, 2], "o": {"y": 1}})", "f");
  int64_t n = 0, absent = 5;
  double x = 0;
  std::string s;
  bool b = false;
  std::vector<int64_t> l;
  Fields fields(json, "f");
  fields.require("n", n);
  EXPECT_TRUE(fields.read("x", x));
  EXPECT_TRUE(fields.read("s", s));
  EXPECT_TRUE(fields.read("b", b));
  EXPECT_TRUE(fields.read("l", l));
  EXPECT_FALSE(fields.read("absent", absent));
  Fields inner = fields.object("o");
  EXPECT_EQ(error_of([&] { inner.finish(); }), "bad data: f: o: found the unknown key \"y\", expected none");
  fields.finish();
  EXPECT_EQ(n, 7);
  EXPECT_EQ(x, 2);
  EXPECT_EQ(s, "t");
  EXPECT_TRUE(b);
  EXPECT_EQ(l, (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(absent, 5);
}

TEST(fields, wrong_types_ranges_and_names_are_errors) {
  const Json json = parse_json(R"({"layers": "four", "n": 3000000000, "x": 1.5, "neg": -1, "l": [1, "a"]})", "c.json");
  Fields fields(json, "c.json", ErrorCode::usage);
  int64_t layers;
  int32_t n;
  uint64_t neg;
  std::vector<int64_t> l;
  EXPECT_NE(error_of([&] {
              fields.read("layers", layers);
            }).find("usage: c.json: key \"layers\": found string \"four\", expected an integer"),
            std::string::npos);
  EXPECT_NE(error_of([&] { fields.read("n", n); }).find("found number 3000000000, expected an integer in [-2147483648"),
            std::string::npos);
  EXPECT_NE(error_of([&] { fields.read("x", layers); }), "");
  EXPECT_NE(error_of([&] { fields.read("neg", neg); }), "");
  EXPECT_NE(error_of([&] { fields.read("l", l); }), "");
  EXPECT_NE(error_of([&] { fields.require("missing", n); }).find("key \"missing\" is missing"), std::string::npos);
  const Json typo = parse_json(R"({"lr_warmpu": 1})", "c.json");
  Fields f(typo, "c.json");
  f.read("lr_warmup", n);
  f.read("seed", n);
  EXPECT_EQ(error_of([&] { f.finish(); }),
            "bad data: c.json: found the unknown key \"lr_warmpu\" (did you mean \"lr_warmup\"?), expected one of "
            "lr_warmup, seed");
  EXPECT_NE(error_of([&] { Fields(parse_json("[]", "c"), "c"); }), "");
}

}  // namespace
}  // namespace ingot
