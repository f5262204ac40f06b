#include "ingot/io/utf8.h"

#include <gtest/gtest.h>

#include <string>

namespace ingot {
namespace {

using namespace std::string_literals;

TEST(utf8, well_formed_text_passes) {
  for (const std::string& text :
       {""s, "a"s, "a\0b"s, "\x7F"s, "h\u00e9llo \u20ac \U0001F600"s, "\uD7FF\uE000\uFFFF\U0010FFFF"s,
        "\u0080\u07FF\u0800\U00010000"s, std::string(1000, 'x')})
    EXPECT_EQ(find_invalid_utf8(text), -1) << text;
}

TEST(utf8, the_first_wrong_byte_is_found) {
  struct Case {
    std::string text;
    int64_t at;
  };
  for (const Case& c : {Case{"\x80", 0},
                        {"ab\xC0\x80", 2},
                        {"\xC1\xBF", 0},
                        {"\xE0\x9F\xBF", 0},
                        {"\xED\xA0\x80", 0},
                        {"\xF0\x8F\xBF\xBF", 0},
                        {"\xF4\x90\x80\x80", 0},
                        {"\xF5\x80\x80\x80", 0},
                        {"\xFF", 0},
                        {"\u20ac\xE2\x82", 3},
                        {"\xE2\x82 ", 0},
                        {std::string(17, 'a') + "\xE9" + std::string(9, 'b'), 17}})
    EXPECT_EQ(find_invalid_utf8(c.text), c.at);
}

TEST(utf8, all_two_byte_strings_agree_with_the_definition) {
  for (int a = 0; a < 256; ++a)
    for (int b = 0; b < 256; ++b) {
      const bool good = (a < 128 && b < 128) || (a >= 0xC2 && a < 0xE0 && b >= 0x80 && b < 0xC0);
      const char text[2] = {char(a), char(b)};
      EXPECT_EQ(find_invalid_utf8({text, 2}) == -1, good) << a << " " << b;
    }
}

}  // namespace
}  // namespace ingot
