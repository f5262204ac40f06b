#include "ingot/text/sentencepiece.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <set>

#include "ingot/core/rng.h"
#include "ingot/io/file.h"
#include "ingot/io/formats/gguf.h"
#include "ingot/io/formats/gguf_writer.test.h"
#include "ingot/io/json.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/text/golden.test.h"
#include "ingot/text/sentencepiece_model.h"

namespace ingot {
namespace {

using testing::error_of;
using testing::Golden;
using testing::text_data;

// Writes the protobuf wire format, for small models and damaged models.
struct Writer {
  std::string bytes;
  Writer& number(int field, uint64_t v) {
    varint(uint64_t(field) << 3);
    varint(v);
    return *this;
  }
  Writer& text(int field, std::string_view v) {
    varint(uint64_t(field) << 3 | 2);
    varint(v.size());
    bytes += v;
    return *this;
  }
  Writer& real(int field, float v) {
    varint(uint64_t(field) << 3 | 5);
    char raw[4];
    std::memcpy(raw, &v, 4);
    bytes.append(raw, 4);
    return *this;
  }
  void varint(uint64_t v) {
    for (; v >= 128; v >>= 7) bytes += char(v | 128);
    bytes += char(v);
  }
};

enum Type { kNormal = 1, kUnknown = 2, kControl = 3, kUserDefined = 4, kUnused = 5, kByte = 6 };
struct TestPiece {
  const char* text;
  float score;
  Type type;
};

std::string model_of(std::vector<TestPiece> pieces, bool keep_spaces = true, int type = 2, bool byte_fallback = false,
                     bool dummy_prefix = false) {
  Writer model;
  for (const TestPiece& p : pieces)
    model.text(1, Writer().text(1, p.text).real(2, p.score).number(3, uint64_t(p.type)).bytes);
  model.text(2, Writer().number(3, uint64_t(type)).number(35, byte_fallback).bytes);
  model.text(3, Writer().number(3, dummy_prefix).number(4, !keep_spaces).bytes);
  return model.bytes;
}

const std::vector<TestPiece> kSmall = {{"<unk>", 0, kUnknown},
                                       {"<s>", 0, kControl},
                                       {"a", -10, kNormal},
                                       {"b", -11, kNormal},
                                       {"c", -12, kNormal},
                                       {"ab", -1, kNormal},
                                       {"bc", -1, kNormal},
                                       {"abc", -3, kUnused},
                                       {"<sep>", 0, kUserDefined},
                                       {"\xe2\x96\x81", -4, kNormal},
                                       {"\xe2\x96\x81"
                                        "a",
                                        -5, kNormal}};

SentencePiece small() { return SentencePiece::parse(model_of(kSmall), "small.model"); }

TEST(SentencePiece, EncodesAndDecodesLikeTheReference) {
  const Golden golden;
  const SentencePiece sp = SentencePiece::load(text_data("sp.model"));
  const auto ids = golden.ids("sentencepiece");
  const auto decoded = golden.json["sentencepiece_decoded"].get<std::vector<std::string>>();
  for (size_t i = 0; i < golden.texts.size(); ++i) {
    EXPECT_EQ(sp.encode(golden.texts[i]), ids[i]) << golden.texts[i];
    EXPECT_EQ(sp.decode(ids[i]), decoded[i]) << golden.texts[i];
  }
  EXPECT_EQ(sp.bos(), 1);
}

// The pieces of the golden model in a GGUF file, which has no field for the table of its normaliser.
std::string gguf_of(const detail::SentencePieceModel& m) {
  std::vector<std::string> tokens;
  std::vector<int32_t> types;
  std::string scores =
      testing::GgufWriter::number(uint32_t(6)) + testing::GgufWriter::number(uint64_t(m.pieces.size()));
  for (const detail::Piece& p : m.pieces) {
    tokens.push_back(p.text), types.push_back(int32_t(p.type));
    scores += testing::GgufWriter::number(p.score);
  }
  testing::GgufWriter w;
  w.key("tokenizer.ggml.model", "llama").key("tokenizer.ggml.tokens", tokens).key("tokenizer.ggml.token_type", types);
  w.add("tokenizer.ggml.scores", 9, scores).key("tokenizer.ggml.add_space_prefix", m.add_dummy_prefix);
  return w.key("tokenizer.ggml.remove_extra_whitespaces", m.remove_extra_whitespaces).bytes();
}
// The same vocabulary as a tokenizer.json: the merges of every piece in the order of the scores.
Json json_of(const detail::SentencePieceModel& m) {
  std::set<std::string> known;
  std::vector<const detail::Piece*> order;
  Json vocab = Json::object(), added = Json::array(), merges = Json::array();
  for (size_t id = 0; id < m.pieces.size(); ++id) {
    const detail::Piece& p = m.pieces[id];
    vocab[p.text] = id;
    if (p.type == detail::PieceType::normal) known.insert(p.text), order.push_back(&p);
    if (p.type == detail::PieceType::control || p.type == detail::PieceType::user_defined)
      added.push_back({{"id", id}, {"content", p.text}, {"special", p.type == detail::PieceType::control}});
  }
  std::stable_sort(order.begin(), order.end(), [](auto* a, auto* b) { return a->score > b->score; });
  for (const detail::Piece* p : order)
    for (size_t cut = 1; cut < p->text.size(); ++cut)
      if (const std::string a = p->text.substr(0, cut), b = p->text.substr(cut); known.count(a) && known.count(b))
        merges.push_back({a, b});
  const Json replace = {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "\u2581"}};
  return {{"normalizer", replace},
          {"added_tokens", added},
          {"model",
           {{"type", "BPE"}, {"unk_token", "<unk>"}, {"byte_fallback", true}, {"vocab", vocab}, {"merges", merges}}}};
}

TEST(SentencePiece, AGgufFileAndATokenizerJsonHoldTheSameVocabulary) {
  const Golden golden;
  const std::string bytes = read_file(text_data("sp.model"));
  const detail::SentencePieceModel m = detail::parse_sentencepiece_model(bytes, "sp.model");
  const SentencePiece sp = SentencePiece::parse(bytes, "sp.model");
  const testing::TemporaryDirectory dir;
  write_file(dir / "model.gguf", gguf_of(m));
  write_file(dir / "tokenizer.json", json_of(m).dump());
  const auto gguf = load_tokenizer(dir / "model.gguf"), json = load_tokenizer(dir / "tokenizer.json");
  EXPECT_EQ(gguf->kind(), "sentencepiece");
  EXPECT_EQ(json->kind(), "sentencepiece");
  EXPECT_EQ(gguf->bos(), sp.bos());
  int compared = 0;
  for (const std::string& text : golden.texts) {
    std::string spaced;
    for (const char c : text) spaced += c == ' ' ? std::string("\u2581") : std::string(1, c);
    if (sp.normalize(text) != spaced) continue;  // the .model's own table changes this text
    ++compared;
    EXPECT_EQ(gguf->encode(text), sp.encode(text)) << text;
    EXPECT_EQ(json->encode(text), sp.encode(text)) << text;
    EXPECT_EQ(json->decode(json->encode(text)), text);
  }
  EXPECT_GE(compared, 15);
}

TEST(SentencePiece, AVocabularyWrittenAsAModelFileIsTheSameVocabulary) {
  const Golden golden;
  const SentencePiece sp = SentencePiece::load(text_data("sp.model"));
  const SentencePiece again = SentencePiece::parse(sp.to_model(), "again");
  EXPECT_EQ(again.hash(), sp.hash());
  for (const std::string& text : golden.texts) EXPECT_EQ(again.encode(text), sp.encode(text)) << text;
}

TEST(SentencePiece, TextWrittenTokenByTokenKeepsItsSpaces) {
  const SentencePiece sp = SentencePiece::load(text_data("sp.model"));
  std::string text;
  for (const int32_t id : sp.encode("one two  three")) text += sp.added_bytes(id);
  EXPECT_EQ(text.find("one two") != text.npos ? text.substr(text.find("one")) : text,
            sp.decode(sp.encode("one two  three")));
  for (const SpecialToken& s : sp.specials()) {
    EXPECT_EQ(sp.added_bytes(s.id), "");
    EXPECT_EQ(sp.token_id(s.text), s.id);
  }
  EXPECT_FALSE(sp.specials().empty());
  EXPECT_EQ(sp.token_id("no such token"), -1);
}

TEST(SentencePiece, RefusesATokenizerJsonWithStepsThatItDoesNotKnow) {
  Json json = json_of(detail::parse_sentencepiece_model(read_file(text_data("sp.model")), "sp.model"));
  const auto said = [&] { return error_of([&] { (void)SentencePiece::parse_json(json, "t"); }); };
  EXPECT_EQ(said(), "");
  json["normalizer"] = {{"type", "Lowercase"}};
  EXPECT_EQ(said(), "bad data: t: normalizer: found \"Lowercase\", expected Prepend and Replace of spaces by U+2581");
  json["normalizer"] = nullptr;
  EXPECT_EQ(said(), "bad data: t: found no step that replaces spaces by U+2581, expected one beside byte_fallback");
  json["pre_tokenizer"] = {{"type", "Metaspace"}, {"prepend_scheme", "first"}};
  EXPECT_EQ(said(), "");
  json["model"]["vocab"]["a"] = 777777;
  EXPECT_NE(said().find("found id 777777, expected no gaps"), std::string::npos) << said();
}

TEST(SentencePiece, AMetaspaceAddsNoSpaceBeforeASpaceAndStartsAWordAtEachSpace) {
  Json vocab = {{"<unk>", 0}}, merges = {"\u2581 a", "\u2581 \u2581", "\u2581\u2581 \u2581a"};
  for (int b = 0; b < 256; ++b) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", b);
    vocab[name] = b + 1;
  }
  const int32_t space = 257, a = 258, space_a = 259, spaces = 260, spaces_a = 261;
  vocab["\u2581"] = space, vocab["a"] = a, vocab["\u2581a"] = space_a, vocab["\u2581\u2581"] = spaces;
  vocab["\u2581\u2581\u2581a"] = spaces_a;
  Json json = {{"model", {{"byte_fallback", true}, {"unk_token", "<unk>"}, {"vocab", vocab}, {"merges", merges}}}};
  const auto ids = [&](const Json& metaspace, const char* text) {
    json["pre_tokenizer"] = metaspace;
    return SentencePiece::parse_json(json, "t").encode(text);
  };
  using Ids = std::vector<int32_t>;
  const Json whole = {{"type", "Metaspace"}, {"prepend_scheme", "first"}, {"split", false}};
  EXPECT_EQ(ids(whole, "a"), (Ids{space_a}));
  EXPECT_EQ(ids(whole, " a"), (Ids{space_a}));  // SentencePiece itself adds a second space here
  EXPECT_EQ(ids(whole, "   a"), (Ids{spaces_a}));
  const Json divided = {{"type", "Metaspace"}, {"prepend_scheme", "first"}};  // `split` is true where a file lacks it
  EXPECT_EQ(ids(divided, "   a"), (Ids{space, space, space_a}));
  EXPECT_EQ(ids({{"type", "Metaspace"}, {"prepend_scheme", "never"}, {"split", false}}, "a a"), (Ids{a, space_a}));
}

TEST(SentencePiece, ACharacterMayStandInPlaceOfItsByte) {
  Json vocab = {{"<unk>", 0}, {"\u2581", 257}, {"\t\t", 258}};
  for (int b = 0; b < 256; ++b) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", b);
    vocab[b == '\t' ? "\t" : name] = b + 1;
  }
  Json json = {{"normalizer", {{"type", "Replace"}, {"pattern", {{"String", " "}}}, {"content", "\u2581"}}},
               {"model", {{"byte_fallback", true}, {"unk_token", "<unk>"}, {"vocab", vocab}, {"merges", {"\t \t"}}}}};
  const SentencePiece sp = SentencePiece::parse_json(json, "t");
  EXPECT_EQ(sp.encode("\t\t\ta"), (std::vector<int32_t>{258, 10, 'a' + 1}));
  EXPECT_EQ(sp.decode(sp.encode("\ta\t\t")), "\ta\t\t");
  json["model"]["vocab"].erase("\t");
  json["model"]["vocab"]["tab"] = 10;
  EXPECT_EQ(error_of([&] { (void)SentencePiece::parse_json(json, "t"); }),
            "bad data: t: found byte_fallback but no piece for byte 9");
}

TEST(SentencePiece, CountsTheBytesOfTheText) {
  const SentencePiece sp = SentencePiece::load(text_data("sp.model"));
  // " the" counts its space after a word, and also after bos, because this model adds no space before a text. A byte
  // piece counts 1, control pieces 0.
  const auto the = sp.encode("x the");
  ASSERT_GE(the.size(), 2u);
  const int32_t id = the[1];
  ASSERT_EQ(sp.token_bytes(id)[0], ' ');
  EXPECT_EQ(sp.bytes(the[0], id), int64_t(sp.token_bytes(id).size()));
  EXPECT_EQ(sp.bytes(sp.bos(), id), int64_t(sp.token_bytes(id).size()));
  EXPECT_EQ(sp.bytes(-1, id), sp.bytes(sp.bos(), id));
  EXPECT_EQ(sp.bytes(id, sp.bos()), 0);
  EXPECT_EQ(sp.bytes(id, 4), 1);  // <0x00>
  EXPECT_EQ(sp.bytes(4, id), int64_t(sp.token_bytes(id).size()));
  const SentencePiece s = small();
  EXPECT_EQ(s.bytes(2, 0), 0);   // unknown
  EXPECT_EQ(s.bytes(2, 7), 0);   // unused
  EXPECT_EQ(s.bytes(7, 10), 2);  // after unused
  EXPECT_EQ(s.bytes(8, 10), 2);  // after user-defined
  EXPECT_EQ(s.bytes(1, 10), 2);  // after <s>, where encoding puts no space before a text
  const SentencePiece with_prefix = SentencePiece::parse(model_of(kSmall, true, 2, false, true), "prefix.model");
  EXPECT_EQ(with_prefix.bytes(1, 10), 1);  // after <s>, the space that encoding puts before a text
  EXPECT_EQ(with_prefix.bytes(2, 10), 2);
  std::vector<TestPiece> spaces = kSmall;
  spaces.push_back({"\xe2\x96\x81\xe2\x96\x81\xe2\x96\x81", -2, kNormal});
  EXPECT_EQ(SentencePiece::parse(model_of(spaces), "spaces.model").bytes(2, 11), 3);
}

// A text without a piece for U+2581, in which a space is three byte pieces.
TEST(SentencePiece, CountsASpaceOfThreeBytePiecesOnce) {
  std::vector<std::string> names;
  for (int b = 0; b < 256; ++b) {
    char name[8];
    std::snprintf(name, sizeof name, "<0x%02X>", unsigned(b));
    names.push_back(name);
  }
  std::vector<TestPiece> pieces = {{"<unk>", 0, kUnknown}, {"<s>", 0, kControl}};
  for (const std::string& name : names) pieces.push_back({name.c_str(), 0, kByte});
  pieces.push_back({"a", -1, kNormal});
  for (const bool dummy_prefix : {false, true}) {
    const SentencePiece sp = SentencePiece::parse(model_of(pieces, true, 2, true, dummy_prefix), "bytes.model");
    for (const std::string text : {"a a", " a", "a  a", "\xe3\x96\x81", "\xe2\x96\x82 a", "a"}) {
      std::vector<int32_t> ids = {sp.bos()};
      for (const int32_t id : sp.encode(text)) ids.push_back(id);
      int64_t sum = 0;
      for (size_t i = 1; i < ids.size(); ++i) sum += sp.bytes_after(std::span(ids).first(i), ids[i]);
      EXPECT_EQ(sum, int64_t(text.size())) << '"' << text << '"' << dummy_prefix;
    }
  }
}

TEST(SentencePiece, MergesByScoreThenFromTheLeft) {
  // ab and bc have equal scores, so the left one is merged. abc is unused and is split into its two merged parts.
  EXPECT_EQ(small().encode("abc"), (std::vector<int32_t>{5, 4}));
  EXPECT_EQ(small().encode("bc a"), (std::vector<int32_t>{6, 10}));
}

TEST(SentencePiece, SplitsUnusedPiecesThatConsistOfUnusedPieces) {
  const SentencePiece sp = SentencePiece::parse(model_of({{"<unk>", 0, kUnknown},
                                                          {"a", -10, kNormal},
                                                          {"b", -11, kNormal},
                                                          {"c", -12, kNormal},
                                                          {"d", -13, kNormal},
                                                          {"ab", -1, kUnused},
                                                          {"abc", -2, kUnused},
                                                          {"abcd", -3, kUnused}}),
                                                "m.model");
  EXPECT_EQ(sp.encode("abcd"), (std::vector<int32_t>{1, 2, 3, 4}));
}

TEST(SentencePiece, KeepsUserDefinedPiecesWholeAndControlPiecesOut) {
  EXPECT_EQ(small().encode("a<sep>b"), (std::vector<int32_t>{2, 8, 3}));
  for (int32_t id : small().encode("<s>")) EXPECT_NE(id, 1);
}

TEST(SentencePiece, MakesOneTokenOfUnknownCharactersInARow) {
  EXPECT_EQ(small().encode("axyzb"), (std::vector<int32_t>{2, 0, 3}));
  EXPECT_EQ(small().encode("x x"), (std::vector<int32_t>{0, 9, 0}));
}

TEST(SentencePiece, RefusesUnsupportedFeatures) {
  const auto refusal = [](const std::string& bytes) {
    return error_of([&] { SentencePiece::parse(bytes, "m.model"); });
  };
  EXPECT_EQ(refusal(model_of(kSmall, true, 1)),
            "unsupported: m.model: found a SentencePiece model of type unigram, expected BPE");
  auto pieces = kSmall;
  pieces.push_back({"ab", -1, kNormal});
  EXPECT_EQ(refusal(model_of(pieces)), "bad data: m.model: piece \"ab\" found twice, the second time with id 11");
  pieces = kSmall;
  pieces[0].type = kNormal;
  EXPECT_EQ(refusal(model_of(pieces)), "bad data: m.model: found no unknown piece, expected one");
  pieces[1].type = kUnknown;
  pieces[0].type = kUnknown;
  EXPECT_NE(refusal(model_of(pieces)).find("found unknown pieces 0 and 1, expected one"), std::string::npos);
  pieces = kSmall;
  pieces.push_back({"<0xG1>", 0, kByte});
  EXPECT_NE(refusal(model_of(pieces)).find("expected <0x00> to <0xFF>"), std::string::npos);
  EXPECT_NE(
      refusal(model_of(kSmall) + Writer().text(2, Writer().number(35, 1).bytes).bytes).find("no piece for byte 0"),
      std::string::npos);
  EXPECT_NE(refusal(model_of({{"\xff", 0, kUnknown}})).find("not valid UTF-8"), std::string::npos);
  EXPECT_NE(refusal(""), "");
  EXPECT_NE(error_of([&] { small().encode("a\xff"); }).find("byte 1 (0xff)"), std::string::npos);
  EXPECT_NE(error_of([&] { small().decode(std::vector<int32_t>{11}); }).find("found id 11, expected 0 to 10"),
            std::string::npos);
}

TEST(SentencePiece, SurvivesDamagedFiles) {
  const std::string good = read_file(text_data("sp.model"));
  for (size_t cut = 0; cut < good.size(); cut += 1 + cut / 8)
    error_of([&] { SentencePiece::parse(std::string_view(good).substr(0, cut), "cut"); });
  // Files with flipped bytes are refused, or give a tokenizer whose ids are in its vocabulary.
  const Golden golden;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    std::string bad = good;
    for (int i = 0; i < 20; ++i) {
      const auto r = Rng(seed, Purpose::test).block(uint64_t(i));
      bad[r[0] % bad.size()] = char(r[1]);
    }
    error_of([&] {
      const SentencePiece sp = SentencePiece::parse(bad, "flipped");
      for (const std::string& text : golden.texts)
        for (int32_t id : sp.encode(text)) EXPECT_LT(id, sp.vocab_size());
    });
  }
}

TEST(SentencePiece, EncodesLongTextWithoutSpacesInNearlyLinearTime) {
  const SentencePiece sp = SentencePiece::load(text_data("sp.model"));
  // A quadratic path would need many minutes for this text.
  const std::string text(1'000'000, 'e');
  EXPECT_EQ(sp.decode(sp.encode(text)), text);
}

}  // namespace
}  // namespace ingot
