#include "ingot/text/tokenizer.h"

#include <gtest/gtest.h>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/io/file.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/text/byte_bpe.h"
#include "ingot/text/char_tokenizer.h"
#include "ingot/text/golden.test.h"
#include "ingot/text/utf8.h"

namespace ingot {
namespace {

using testing::error_of;
using testing::text_data;

TEST(Tokenizer, IsLoadedByContent) {
  const testing::TemporaryDirectory directory;
  CharTokenizer::from_text("hello").save(directory / "chars.json");
  EXPECT_EQ(load_tokenizer(directory / "chars.json")->kind(), "char");
  EXPECT_EQ(load_tokenizer(text_data("bpe.json"))->kind(), "byte_bpe");
  EXPECT_EQ(load_tokenizer(text_data("sp.model"))->kind(), "sentencepiece");
  ByteBpe::load(text_data("bpe.json")).save(directory / "tokenizer.json");
  EXPECT_EQ(load_tokenizer(directory.path())->kind(), "byte_bpe");  // a model's directory
  create_directories(directory / "ranks");
  std::string ranks;  // one byte each
  const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  for (int b = 0; b < 256; ++b)
    ranks += std::string{digits[b >> 2], digits[(b & 3) << 4], '=', '=', ' '} + std::to_string(b) + "\n";
  write_file(directory / "ranks/o200k_base.tiktoken", ranks);
  EXPECT_EQ(load_tokenizer(directory / "ranks")->vocab_size(), 256 + 1090);
  write_file(directory / "ranks/other.tiktoken", ranks);
  EXPECT_NE(error_of([&] { load_tokenizer(directory / "ranks"); }).find("found 2 .tiktoken files"), std::string::npos);
  write_file(directory / "empty", "\n");
  EXPECT_NE(error_of([&] { load_tokenizer(directory / "empty"); }).find("found an empty file"), std::string::npos);
  EXPECT_NE(error_of([&] { load_tokenizer(directory / "none"); }).find("not found"), std::string::npos);
  write_file(directory / "other", "not a tokenizer");
  EXPECT_NE(error_of([&] { load_tokenizer(directory / "other"); }).find(directory / "other"), std::string::npos);
}

TEST(Tokenizer, HashesTellVocabulariesApartAndAreNeverZero) {
  const auto a = load_tokenizer(text_data("bpe.json")), b = load_tokenizer(text_data("sp.model"));
  EXPECT_EQ(a->hash(), load_tokenizer(text_data("bpe.json"))->hash());
  ByteBpeRules rules = ByteBpe::load(text_data("bpe.json")).rules();
  rules.pattern = WordPattern::o200k;
  EXPECT_NE(ByteBpe(rules).hash(), a->hash());
  rules = ByteBpe::load(text_data("bpe.json")).rules();
  std::swap(rules.merges[3], rules.merges[4]);
  EXPECT_NE(ByteBpe(rules).hash(), a->hash());
  EXPECT_NE(CharTokenizer::from_text("ab").hash(), CharTokenizer::from_text("abc").hash());
  for (uint32_t h : {a->hash(), b->hash(), CharTokenizer::from_text("ab").hash()}) EXPECT_NE(h, 0u);
}

TEST(Tokenizer, ManyDocumentsGiveTheSameIdsOnAnyNumberOfThreads) {
  const testing::Golden golden;
  const auto bpe = load_tokenizer(text_data("bpe.json"));
  const std::vector<std::string_view> documents(golden.texts.begin(), golden.texts.end());
  for (int threads : {1, 2, 3}) {
    set_thread_count(threads);
    EXPECT_EQ(encode_documents(*bpe, documents), golden.ids("gpt2"));
  }
  EXPECT_TRUE(encode_documents(*bpe, {}).empty());
}

TEST(CharTokenizer, NumbersDistinctCharactersInCodePointOrder) {
  const CharTokenizer t = CharTokenizer::from_text(
      "b\xc3\xa9"
      "a\n\xf0\x9f\x98\x80"
      "ab");
  EXPECT_EQ(t.vocab_size(), 5);
  EXPECT_EQ(t.encode("\nab\xc3\xa9\xf0\x9f\x98\x80"), (std::vector<int32_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(t.decode(std::vector<int32_t>{4, 3, 1}),
            "\xf0\x9f\x98\x80\xc3\xa9"
            "a");
  EXPECT_EQ(t.bytes(0, 4), 4);
  EXPECT_EQ(t.bytes(0, 3), 2);
  EXPECT_EQ(t.bos(), -1);
  const testing::TemporaryDirectory directory;
  t.save(directory / "chars.json");
  EXPECT_EQ(load_tokenizer(directory / "chars.json")->hash(), t.hash());
}

TEST(CharTokenizer, RefusesUnknownCharactersAndDamagedFiles) {
  const CharTokenizer t = CharTokenizer::from_text("ab");
  EXPECT_NE(error_of([&] { t.encode("abz"); }).find("byte 2: found the character \"z\""), std::string::npos);
  EXPECT_NE(error_of([&] { t.encode("\xff"); }).find("byte 0 (0xff)"), std::string::npos);
  const auto refusal = [](const char* json) { return error_of([&] { CharTokenizer::parse(json, "c.json"); }); };
  EXPECT_EQ(refusal(R"({"format": "ingot-char", "version": 1, "characters": "abc"})"), "");
  for (const char* bad :
       {R"({"format": "ingot-char", "version": 2, "characters": "abc"})",
        R"({"format": "ingot-char", "version": 1, "characters": "aa"})",
        R"({"format": "ingot-char", "version": 1, "characters": "ba"})",
        R"({"format": "ingot-char", "version": 1, "characters": ""})", R"({"format": "ingot-char", "version": 1})",
        R"({"format": "x", "version": 1, "characters": "a"})"})
    EXPECT_EQ(refusal(bad).find("bad data: c.json"), 0u) << bad << ": " << refusal(bad);
}

TEST(Utf8Stream, NeverSplitsACharacterHoweverTheBytesArrive) {
  const std::string text = "a\xc3\xa9\xe3\x81\x82\xf0\x9f\x98\x80z";
  for (size_t step = 1; step <= text.size(); ++step) {
    Utf8Stream stream;
    std::string out;
    for (size_t i = 0; i < text.size(); i += step) {
      const std::string part = stream.push(std::string_view(text).substr(i, step));
      EXPECT_EQ(find_invalid_utf8(part), -1);
      out += part;
    }
    EXPECT_EQ(out + stream.finish(), text);
  }
}

TEST(Utf8Stream, ReplacesBytesThatCanNeverBecomeACharacter) {
  const struct {
    const char *bytes, *text;
  } cases[] = {{"\xff"
                "a",
                "\xef\xbf\xbd"
                "a"},
               {"\xe3\x81"
                "a",
                "\xef\xbf\xbd"
                "a"},  // an incomplete character followed by another one
               {"\xed\xa0\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"},
               {"\xc0\x80", "\xef\xbf\xbd\xef\xbf\xbd"},
               {"\xf4\x90", "\xef\xbf\xbd\xef\xbf\xbd"},
               {"ok\xf0\x9f\x98", "ok\xef\xbf\xbd"}};
  for (const auto& c : cases) {
    Utf8Stream stream;
    std::string out = stream.push(c.bytes);
    out += stream.finish();
    EXPECT_EQ(out, c.text);
    EXPECT_EQ(stream.push("b") + stream.finish(), "b");
  }
}

}  // namespace
}  // namespace ingot
