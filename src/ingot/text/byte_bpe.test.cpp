#include "ingot/text/byte_bpe.h"

#include <gtest/gtest.h>

#include <ctime>
#include <thread>
#include <unordered_map>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/rng.h"
#include "ingot/io/file.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/text/golden.test.h"
#include "ingot/text/nfc.h"
#include "ingot/text/utf8.h"
#include "ingot/text/words.h"

namespace ingot {
namespace {

using testing::error_of;
using testing::Golden;
using testing::text_data;
constexpr WordPattern kPatterns[] = {WordPattern::gpt2,  WordPattern::cl100k, WordPattern::o200k,
                                     WordPattern::qwen2, WordPattern::tekken, WordPattern::smollm};

ByteBpe golden_bpe(WordPattern pattern = WordPattern::gpt2) {
  ByteBpeRules rules = ByteBpe::load(text_data("bpe.json")).rules();
  rules.pattern = pattern;
  return ByteBpe(rules);
}

// Characters of every kind that the patterns distinguish, and sometimes any code point.
std::string odd_text(uint64_t seed, int characters) {
  static const std::u32string kPool =
      U"abSTd'' \t\n\r .,!/12\u00e9\u017f\u01c5\u02b0\u0301\u0302\u3042\u65e5\u3000\u00a0\u0663\u2167\U0001f600\u200d";
  std::string out;
  for (int i = 0; i < characters; ++i) {
    const auto [r, any, code, unused] = Rng(seed, Purpose::test).block(uint64_t(i));
    char32_t c = any % 16 == 0 ? code % 0x110000 : kPool[r % kPool.size()];
    if (c >= 0xd800 && c < 0xe000) c = 'x';
    utf8_append(out, c);
  }
  return out;
}

// Merging by its definition: repeatedly the pair of the lowest rank, the leftmost first.
std::vector<int32_t> merge_by_definition(const ByteBpeRules& rules, std::string_view word) {
  std::vector<int32_t> ids;
  for (char c : word)
    for (size_t i = 0; i < rules.tokens.size(); ++i)
      if (rules.tokens[i].size() == 1 && rules.tokens[i][0] == c) ids.push_back(int32_t(i));
  while (true) {
    size_t best_rank = rules.merges.size(), best = 0;
    for (size_t i = 0; i + 1 < ids.size(); ++i)
      for (size_t rank = 0; rank < best_rank; ++rank)
        if (rules.merges[rank] == std::pair(ids[i], ids[i + 1])) best_rank = rank, best = i;
    if (best_rank == rules.merges.size()) return ids;
    const std::string joined = rules.tokens[size_t(ids[best])] + rules.tokens[size_t(ids[best + 1])];
    ids.erase(ids.begin() + int64_t(best) + 1);
    ids[best] = int32_t(std::find(rules.tokens.begin(), rules.tokens.end(), joined) - rules.tokens.begin());
  }
}

TEST(ByteBpe, GivesTheIdsOfTheReferencesForEveryPattern) {
  const Golden golden;  // tests/parity/parity_tokenizer.py compares the other patterns
  for (WordPattern pattern : {WordPattern::gpt2, WordPattern::cl100k, WordPattern::o200k, WordPattern::qwen2}) {
    const ByteBpe bpe = golden_bpe(pattern);
    const auto want = golden.ids(word_pattern_name(pattern));
    for (size_t i = 0; i < golden.texts.size(); ++i)
      EXPECT_EQ(bpe.encode(golden.texts[i]), want[i]) << word_pattern_name(pattern) << ": " << golden.texts[i];
  }
}

TEST(ByteBpe, LearnsTheMergesOfTheReference) {
  const Golden golden;
  const std::string license = read_file(std::string(INGOT_SOURCE_DIR) + "/LICENSE");
  std::vector<std::string_view> documents = {license};
  documents.insert(documents.end(), golden.texts.begin(), golden.texts.end());
  const ByteBpe want = golden_bpe();
  for (int threads : {1, 2, 3}) {
    set_thread_count(threads);
    const ByteBpe got = train_bpe(documents, want.vocab_size());
    EXPECT_EQ(got.rules().merges, want.rules().merges) << threads << " threads";
    EXPECT_EQ(got.rules().tokens, want.rules().tokens);
    EXPECT_EQ(got.hash(), want.hash());
  }
}

TEST(ByteBpe, RefusesTextWithAByteForWhichTheVocabularyHasNoToken) {
  ByteBpeRules rules;
  for (int b = 0; b < 256; ++b)
    if (b != 4 && b < 245) rules.tokens.push_back(std::string(1, char(b)));
  const ByteBpe bpe(rules);
  EXPECT_EQ(bpe.decode(bpe.encode("caf\u00e9\n")), "caf\u00e9\n");
  try {
    (void)bpe.encode("ab\x04");
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "text to encode: found byte 4 at offset 2, for which the tokenizer has no token");
  }
  rules.tokens.erase(rules.tokens.begin() + 'a' - 1);  // a byte that most texts have
  EXPECT_THROW(ByteBpe bpe(rules), Error);
}

TEST(ByteBpe, DecodesItsOwnIdsAndCountsTheBytes) {
  for (WordPattern pattern : kPatterns) {
    const ByteBpe bpe = golden_bpe(pattern);
    for (uint64_t seed = 0; seed < 200; ++seed) {
      const std::string text = odd_text(seed, 1 + int(seed) * 3);
      const auto ids = bpe.encode(text);
      EXPECT_EQ(bpe.decode(ids), text);
      int64_t bytes = 0;
      for (int32_t id : ids) bytes += bpe.bytes(bpe.bos(), id);
      EXPECT_EQ(bytes, int64_t(text.size()));
    }
  }
}

TEST(ByteBpe, MergesShortAndLongWordsAsTheDefinitionSays) {
  const ByteBpe bpe = golden_bpe();
  for (int letters : {1, 2, 15, 16, 17, 63, 64, 65, 300}) {
    std::string word;
    for (int i = 0; i < letters; ++i) word += "theraion"[Rng(uint64_t(letters), Purpose::test).below(uint64_t(i), 8)];
    const auto want = merge_by_definition(bpe.rules(), word);
    EXPECT_EQ(bpe.encode(word), want) << word;
    EXPECT_EQ(bpe.encode(word), want) << "from the cache: " << word;
  }
}

TEST(ByteBpe, CutsWordsAsThePatternsSay) {
  const struct {
    WordPattern pattern;
    const char *text, *words;  // joined by |
  } cases[] = {
      {WordPattern::gpt2, "it's we'LL  go\n\n x ", "it|'s| we|'|LL| | go|\n\n| x| "},
      {WordPattern::gpt2, "a1234 !?\n", "a|1234| !?|\n"},
      {WordPattern::cl100k,
       "'\xc5\xbf"
       "a'LLb x1234",
       "'\xc5\xbf|a|'LL|b| x|123|4"},  // a long s is an s where case is ignored
      {WordPattern::cl100k, "!!\r\n\n  \n a\ta", "!!\r\n\n|  \n| a|\ta"},
      {WordPattern::qwen2, "x12 3", "x|1|2| |3"},
      {WordPattern::tekken, "HTTPServer don't 12/\n", "HTTPServer| don|'t| |1|2|/\n"},
      {WordPattern::smollm, "it's  12  a3\n\n4 !", "it|'s|  |1|2| | a|3|\n\n|4| !"},
      {WordPattern::o200k, "HTTPServer don't ABC's", "HTTPServer| don't| ABC's"},
      {WordPattern::o200k,
       "\xcc\x81"
       "ABC //\n/x",
       "\xcc\x81|ABC| //\n/|x"},  // without a lower-case letter, the mark is a word of its own
  };
  for (const auto& c : cases) {
    std::string words;
    detail::cut_words(c.pattern, c.text,
                      [&](const char* p, const char* q) { words += (words.empty() ? "" : "|") + std::string(p, q); });
    EXPECT_EQ(words, c.words) << word_pattern_name(c.pattern);
  }
}

TEST(ByteBpe, CutsTextInTheSamePlacesForAnyTextAfterAWord) {
  // The trainer counts chunks that are cut before the space of "letter space letter", which must be the beginning of a
  // word.
  for (WordPattern pattern : kPatterns)
    for (uint64_t seed = 0; seed < 100; ++seed) {
      const std::string left = odd_text(seed, 20) + "a", right = " b" + odd_text(seed + 1000, 20);
      std::vector<std::string> whole, parts;
      detail::cut_words(pattern, left + right, [&](const char* p, const char* q) { whole.emplace_back(p, q); });
      for (const std::string& part : {left, right})
        detail::cut_words(pattern, part, [&](const char* p, const char* q) { parts.emplace_back(p, q); });
      EXPECT_EQ(whole, parts);
    }
}

TEST(ByteBpe, TheTextOfASpecialTokenIsOrdinaryText) {
  const ByteBpe bpe = golden_bpe();
  EXPECT_EQ(bpe.bos(), 0);
  for (int32_t id : bpe.encode("<|bos|>")) EXPECT_NE(id, bpe.bos());
  const int32_t ids[] = {bpe.bos(), bpe.encode("a")[0], bpe.bos()};
  EXPECT_EQ(bpe.decode(ids), "a");
  EXPECT_EQ(bpe.bytes(-1, bpe.bos()), 0);
  EXPECT_EQ(bpe.token_bytes(bpe.bos()), "<|bos|>");
}

TEST(ByteBpe, OrdinaryTextIsCutAtAddedTokensTheLongestFirst) {
  ByteBpeRules rules = golden_bpe().rules();
  const auto first = int32_t(rules.tokens.size());
  for (const char* text : {"<think>", "<think>s", "  ", "e\xcc\x81!"}) {
    rules.added.push_back({int32_t(rules.tokens.size()), text[0] == 'e'});
    rules.tokens.push_back(text);
  }
  rules.nfc = true;
  const ByteBpe bpe(rules);
  const auto joined = [&](std::initializer_list<std::vector<int32_t>> parts) {
    std::vector<int32_t> all;
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  };
  EXPECT_EQ(bpe.encode("<think>"), std::vector<int32_t>{first});
  EXPECT_EQ(bpe.encode("<think>so<think>"), joined({{first + 1}, bpe.encode("o"), {first}}));
  EXPECT_EQ(bpe.encode("a   b"), joined({bpe.encode("a"), {first + 2}, bpe.encode(" b")}));
  // An added token that is searched in the normalized text is found in either spelling.
  EXPECT_EQ(bpe.encode("e\xcc\x81!"), std::vector<int32_t>{first + 3});
  EXPECT_EQ(bpe.encode("x\xc3\xa9!"), joined({bpe.encode("x"), {first + 3}}));
  EXPECT_EQ(bpe.bytes(-1, first), 7);
  EXPECT_EQ(bpe.decode(bpe.encode("a<think>so  ")), "a<think>so  ");
  EXPECT_NE(bpe.hash(), golden_bpe().hash());
  const ByteBpe back = ByteBpe::parse(bpe.to_json(), "t.json");
  EXPECT_EQ(back.hash(), bpe.hash());
  EXPECT_EQ(back.to_json(), bpe.to_json());
  rules.added.push_back({0, false});
  EXPECT_NE(error_of([&] { ByteBpe bad(rules); }).find("added token: found id 0"), std::string::npos);
}

TEST(ByteBpe, TextIsConvertedToNormalFormCIfTheFileRequiresThis) {
  ByteBpeRules rules = golden_bpe().rules();
  rules.nfc = true;
  const ByteBpe plain = golden_bpe(), nfc(rules);
  EXPECT_EQ(nfc.encode("cafe\xcc\x81 \xe1\x84\x92\xe1\x85\xa1\xe1\x86\xab"), plain.encode("caf\xc3\xa9 \xed\x95\x9c"));
  EXPECT_NE(plain.encode("e\xcc\x81"), plain.encode("\xc3\xa9"));
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const std::string text = to_nfc(odd_text(seed, 30));
    EXPECT_EQ(nfc.encode(text), plain.encode(text));
    EXPECT_EQ(to_nfc(text), text);
  }
}

TEST(ByteBpe, TheFirstSpecialTokenStartsADocumentAndIsReadBack) {
  const std::string_view documents[] = {"the theme of the thesis the \xC3\xA9t\xC3\xA9"};
  const std::vector<std::vector<std::string>> lists = {
      {"<|doc|>"}, {"<|endoftext|>", "<s>"}, {"the", "<|bos|>"}, {"\xC3\x83\xC2\xA9"}};
  for (const auto& specials : lists) {
    const ByteBpe bpe = train_bpe(documents, 270, {.special_tokens = specials});
    const ByteBpe again = ByteBpe::parse(bpe.to_json(), "again");
    EXPECT_EQ(bpe.bos(), 0) << specials[0];
    EXPECT_EQ(again.bos(), 0) << specials[0];
    EXPECT_EQ(again.hash(), bpe.hash()) << specials[0];
    EXPECT_EQ(again.encode("the thesis"), bpe.encode("the thesis")) << specials[0];
  }
  EXPECT_EQ(start_token(std::vector<SpecialToken>{{0, "<unk>"}, {1, "<s>"}}), 1);
  EXPECT_EQ(start_token(std::vector<SpecialToken>{{7, "<|im_start|>"}}), -1);
}

TEST(ByteBpe, RefusesASpecialTokenThatStandsTwiceOrLeavesAGap) {
  const ByteBpeRules good = golden_bpe(kPatterns[0]).rules();
  const auto next = int32_t(good.tokens.size());
  const auto error = [&](const std::vector<SpecialToken>& more) {
    ByteBpeRules rules = good;
    rules.specials.insert(rules.specials.end(), more.begin(), more.end());
    return error_of([&] { ByteBpe bad(rules); });
  };
  EXPECT_NE(error({{next, "<twice>"}, {next + 1, "<twice>"}}).find("<twice>\" found twice, ids "), std::string::npos);
  EXPECT_NE(error({{next, "<a>"}, {next + 2, "<b>"}}).find("expected no gaps"), std::string::npos);
}

TEST(ByteBpe, RefusesSpecialTokensThatAFileCouldNotHold) {
  const std::string_view documents[] = {"text"};
  const auto error = [&](const std::vector<std::string>& specials) {
    return error_of([&] { train_bpe(documents, 300, {.special_tokens = specials}); });
  };
  EXPECT_NE(error({"a"}).find("found 'a', which is how a tokenizer.json spells a byte"), std::string::npos);
  EXPECT_NE(error({"\xC4\xA0"}).find("spells a byte"), std::string::npos);  // the spelling of a space
  EXPECT_NE(error({"<a>", "<a>"}).find("found '<a>' twice"), std::string::npos);
  EXPECT_NE(error({""}).find("found an empty text"), std::string::npos);
  EXPECT_NE(error({"<pad>", "<s>"})
                .find("found '<pad>' first, whose name says that it starts no document; expected '<s>' first"),
            std::string::npos);
}

TEST(ByteBpe, RefusesTextThatIsNotUtf8WithTheOffset) {
  const ByteBpe bpe = golden_bpe();
  EXPECT_EQ(error_of([&] { bpe.encode("abc\xff"); }), "bad data: text to encode: byte 3 (0xff) is not valid UTF-8");
  EXPECT_NE(error_of([&] { bpe.encode("\xed\xa0\x80"); }), "");        // a surrogate
  EXPECT_NE(error_of([&] { bpe.encode("\xc0\x80"); }), "");            // overlong
  EXPECT_NE(error_of([&] { bpe.encode("ok\xf4\x90\x80\x80"); }), "");  // above U+10FFFF
  EXPECT_NE(error_of([&] { bpe.encode("cut \xe2\x82"); }), "");
  const std::string_view documents[] = {"fine", "\x80"};
  EXPECT_NE(error_of([&] { train_bpe(documents, 300); }).find("document 1"), std::string::npos);
}

TEST(ByteBpe, TimeGrowsWithTheTextNotWithItsSquare) {
  // Twice the text may take up to four times as long before this test fails, a loose bound for a busy machine; a
  // quadratic path would take minutes at these sizes.
  std::string alike[] = {"a", " ", "\n", "'", "1", "\xcc\x81", " \n", "\xe3\x81\x82", "A\xcc\x81", "the"};
  for (WordPattern pattern : kPatterns) {
    const ByteBpe bpe = golden_bpe(pattern);
    for (const std::string& unit : alike) {
      const auto seconds = [&](size_t bytes) {
        std::string text;
        while (text.size() < bytes) text += unit;
        double best = 1e9;
        for (int i = 0; i < 3; ++i) {
          const std::clock_t start = std::clock();  // time of this process, because the machine may be busy
          bpe.encode(text);
          best = std::min(best, double(std::clock() - start) / CLOCKS_PER_SEC);
        }
        return best;
      };
      const double once = seconds(50'000), twice = seconds(100'000);
      EXPECT_LT(twice, 4 * once + 0.02) << word_pattern_name(pattern) << " on repeated \"" << unit << "\"";
    }
    EXPECT_EQ(bpe.decode(bpe.encode(std::string(1'000'000, 'a'))).size(), 1'000'000u);
  }
}

TEST(ByteBpe, WritesAFileThatReadsBackTheSame) {
  const testing::TemporaryDirectory directory;
  for (WordPattern pattern : kPatterns) {
    ByteBpeRules rules = golden_bpe(pattern).rules();
    rules.specials.push_back({int32_t(rules.tokens.size()), "<|odd \"\\ \n\xc3\xa9|>"});
    const ByteBpe bpe(rules);
    bpe.save(directory / "tokenizer.json");
    const ByteBpe back = ByteBpe::load(directory / "tokenizer.json");
    EXPECT_EQ(back.hash(), bpe.hash());
    EXPECT_EQ(back.to_json(), bpe.to_json());
    EXPECT_EQ(back.token_bytes(back.vocab_size() - 1), rules.specials.back().text);
  }
}

TEST(ByteBpe, AWordThatIsATokenRemainsOneTokenWithIgnoreMerges) {
  ByteBpeRules rules = golden_bpe().rules();
  rules.tokens.push_back("zqx");  // no merge gives this token
  EXPECT_EQ(ByteBpe(rules).encode("zqx").size(), 3u);
  rules.ignore_merges = true;
  EXPECT_EQ(ByteBpe(rules).encode("zqx"), std::vector<int32_t>{int32_t(rules.tokens.size()) - 1});
}

// --- tiktoken's files
std::string base64(std::string_view bytes) {
  static constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (size_t i = 0; i < bytes.size(); i += 3) {
    uint32_t bits = 0;
    for (size_t j = i; j < i + 3; ++j) bits = bits << 8 | (j < bytes.size() ? uint8_t(bytes[j]) : 0);
    for (size_t j = 0; j < 4; ++j) out += i + j > bytes.size() ? '=' : kDigits[bits >> (18 - 6 * j) & 63];
  }
  return out;
}
// The golden vocabulary as a tiktoken file, with tokens that overlap themselves.
std::vector<std::string> ranked_tokens() {
  const ByteBpe golden = golden_bpe();
  std::vector<std::string> tokens;
  for (const std::string& t : golden.rules().tokens)
    if (!t.empty()) tokens.push_back(t);
  for (const char* more : {"aa", "aaa", "aba", "abaaba", "aaaaa", "ab", "ba"})
    if (std::find(tokens.begin(), tokens.end(), more) == tokens.end()) tokens.push_back(more);
  return tokens;
}
std::string tiktoken_file(const std::vector<std::string>& tokens) {
  std::string text;
  for (size_t i = 0; i < tokens.size(); ++i) text += base64(tokens[i]) + " " + std::to_string(i) + "\n";
  return text;
}
// tiktoken's rule by its definition: the whole word if the word is a token; otherwise the two neighbours that join to
// the smallest token are merged, repeatedly.
std::vector<int32_t> join_by_definition(const std::unordered_map<std::string, int64_t>& ids, const std::string& word) {
  const auto none = int64_t(ids.size());
  const auto id_of = [&](const std::string& bytes) {
    const auto found = ids.find(bytes);
    return found == ids.end() ? none : found->second;
  };
  std::vector<std::string> parts;
  if (id_of(word) < none)
    parts.push_back(word);
  else
    for (char c : word) parts.emplace_back(1, c);
  while (true) {
    int64_t best = none;
    size_t at = 0;
    for (size_t i = 0; i + 1 < parts.size(); ++i)
      if (const int64_t id = id_of(parts[i] + parts[i + 1]); id < best) best = id, at = i;
    if (best == none) break;
    parts[at] += parts[at + 1];
    parts.erase(parts.begin() + int64_t(at) + 1);
  }
  std::vector<int32_t> joined;
  for (const std::string& p : parts) joined.push_back(int32_t(id_of(p)));
  return joined;
}

TEST(ByteBpe, ReadsTiktokensRanksAndMergesByTheirRule) {
  const std::vector<std::string> tokens = ranked_tokens();
  const ByteBpe bpe = ByteBpe::parse_tiktoken(tiktoken_file(tokens), "o.tiktoken");
  EXPECT_EQ(bpe.rules().pattern, WordPattern::o200k);
  const int n = int(tokens.size());
  std::unordered_map<std::string, int64_t> ids;
  for (const std::string& t : tokens) ids.emplace(t, int64_t(ids.size()));
  EXPECT_EQ(int(ids.size()), n);
  EXPECT_EQ(bpe.vocab_size(), n + 1090);
  for (const auto& [offset, name] :
       std::vector<std::pair<int, std::string>>{{0, "<|startoftext|>"},
                                                {1, "<|endoftext|>"},
                                                {2, "<|reserved_" + std::to_string(n + 2) + "|>"},
                                                {4, "<|return|>"},
                                                {5, "<|constrain|>"},
                                                {7, "<|channel|>"},
                                                {8, "<|start|>"},
                                                {9, "<|end|>"},
                                                {10, "<|message|>"},
                                                {14, "<|call|>"},
                                                {20, "<|endofprompt|>"}})
    EXPECT_EQ(bpe.token_bytes(n + offset), name);
  for (const int letters : {1, 2, 7, 63, 64, 65, 200})
    for (uint64_t seed = 0; seed < 20; ++seed) {
      std::string word;
      for (int i = 0; i < letters; ++i) word += "aaba"[Rng(seed, Purpose::test).below(uint64_t(i), 4)];
      EXPECT_EQ(bpe.encode(word), join_by_definition(ids, word)) << word;
    }
  EXPECT_EQ(ByteBpe::parse(bpe.to_json(), "back").rules().merges, bpe.rules().merges);
}

TEST(ByteBpe, RefusesDamagedTiktokenFilesByLine) {
  const auto refusal = [](const std::string& text) { return error_of([&] { ByteBpe::parse_tiktoken(text, "o"); }); };
  const std::string good = tiktoken_file(ranked_tokens());
  EXPECT_EQ(refusal(good), "");
  EXPECT_EQ(refusal(good.substr(0, good.find('\n') + 1) + good), "bad data: o: line 2: found rank 0, expected 1");
  EXPECT_EQ(refusal("IQ== 0 1\n"), "bad data: o: line 1: found no rank, expected \"base64 rank\"");
  EXPECT_EQ(refusal("IQ== -1\n"), "bad data: o: line 1: found no rank, expected \"base64 rank\"");
  EXPECT_EQ(refusal("IQ== 99999999999\n"), "bad data: o: line 1: found no rank, expected \"base64 rank\"");
  EXPECT_EQ(refusal("IQ==\n"), "bad data: o: line 1: found one word, expected \"base64 rank\"");
  for (const char* wrong : {"IR== 0", "I=== 0", "IQ= 0", "I Q 0", "I?== 0", " 0", "==== 0"})
    EXPECT_NE(refusal(wrong).find("o: line 1: found "), std::string::npos) << wrong;
  EXPECT_EQ(refusal("IQ== 0\n"), "bad data: o: found no token for byte 0, expected one for each of the 256 bytes");
  EXPECT_EQ(refusal(base64(std::string(100'000, 'a')) + " 0\n"),
            "bad data: o: line 1: found a token of 100000 bytes, expected tokens the length of words");
}

TEST(ByteBpe, ManyThreadsEncodeWithOneTokenizer) {
  const ByteBpe bpe = golden_bpe();
  std::vector<std::string> texts;
  for (uint64_t i = 0; i < 40; ++i) texts.push_back(odd_text(i, 500));
  std::vector<std::vector<int32_t>> want, got(texts.size());
  for (const std::string& t : texts) want.push_back(bpe.encode(t));
  std::vector<std::thread> threads;
  for (size_t t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (size_t i = t; i < texts.size(); i += 4) got[i] = bpe.encode(texts[i]);
    });
  for (auto& t : threads) t.join();
  EXPECT_EQ(got, want);
}

TEST(ByteBpe, TrainingAcceptsNoTextAndStopsWhenPairsRunOut) {
  EXPECT_EQ(train_bpe({}, 400).vocab_size(), 257);
  const std::string_view documents[] = {"", "abab abab", " abab"};
  const ByteBpe bpe = train_bpe(documents, 400, {.special_tokens = {}});
  EXPECT_EQ(bpe.bos(), -1);
  // ab, abab, and " abab", which all occur at least twice.
  EXPECT_EQ(bpe.vocab_size(), 259);
  EXPECT_EQ(bpe.encode("abab abab").size(), 2u);
  EXPECT_NE(error_of([&] { train_bpe(documents, 100); }).find("found vocab_size 100, expected 257"), std::string::npos);
}

// Each damaged file is refused with its name, the value found and the value expected.
TEST(ByteBpe, RefusesDamagedFilesByName) {
  const std::string good = golden_bpe().to_json();
  const auto refusal = [](const std::string& json) { return error_of([&] { ByteBpe::parse(json, "t.json"); }); };
  ASSERT_EQ(refusal(good), "");
  struct Case {
    const char *path, *value, *message;
  };
  const Case cases[] = {
      {"/model/vocab/a", "-1", "found id -1"},
      {"/model/vocab/a", "1.5", "found id 1.5"},
      {"/model/vocab/a", "\"x\"", "expected an integer"},
      {"/model/vocab/a", "99999999999", "found id 99999999999"},
      {"/model/vocab/a", "4000000", "expected no gaps"},
      {"/model/vocab/a", "5", "two tokens with id 5"},
      {"/model/vocab/a b", "600", "expected only the 256 characters"},
      {"/model/vocab/abcdef", "601", "expected no gaps"},
      {"/model/merges/0", "\"zz qq\"", "unknown token"},
      {"/model/merges/0", "\"a\"", "expected two tokens"},
      {"/model/merges/0", "[\"a\", 1]", "expected two tokens"},
      {"/model/merges/0", "\"a <|bos|>\"", "unknown token"},
      {"/model/merges/0", "\"! !\"", "no token for their joined bytes"},
      {"/model/type", "\"WordPiece\"", "expected \"BPE\""},
      {"/model/byte_fallback", "true", "expected false"},
      {"/model/dropout", "0.1", "model.dropout"},
      {"/model/vocab", "[]", "expected object"},
      {"/model/merges", "{}", "expected array"},
      {"/normalizer", "{\"type\": \"NFKC\"}", "found \"NFKC\", expected none or \"NFC\""},
      {"/pre_tokenizer/type", "\"Whitespace\"", "found \"Whitespace\""},
      {"/pre_tokenizer/add_prefix_space", "true", "expected false"},
      {"/pre_tokenizer",
       "{\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": \"Split\", \"behavior\": \"Isolated\", \"pattern\": "
       "{\"Regex\": \"a+\"}}, {\"type\": \"ByteLevel\", \"use_regex\": false}]}",
       "unknown regular expression a+"},
      {"/added_tokens/0/id", "3", "<|bos|>"},
      {"/added_tokens/0/id", "-3", "found id -3"},
      {"/added_tokens/0/content", "\"\"", "empty text"},
      {"/added_tokens/0/special", "3", "\"<|bos|>\": special: found number 3, expected true or false"},
      {"/added_tokens/0", "{\"id\": 0, \"content\": \"x y\", \"special\": false, \"lstrip\": true}",
       "\"x y\": lstrip: found true, expected false"},
      {"/added_tokens/0", "{\"id\": 5, \"content\": \"x y\", \"special\": false}", "two tokens with id 5"},
      {"/added_tokens/0", "{\"id\": 100000, \"content\": \"x y\", \"special\": false}", "expected no gaps"},
      {"/added_tokens/0", "{\"id\": 0, \"content\": \"\", \"special\": false}", "found an empty text"},
      {"/added_tokens", "3", "expected array"},
  };
  for (const Case& c : cases) {
    Json json = parse_json(good, "good");
    json[Json::json_pointer(c.path)] = parse_json(c.value, "value");
    const std::string found = refusal(write_json(json));
    EXPECT_EQ(found.find("bad data: t.json: "), 0u) << c.path << " = " << c.value << ": " << found;
    EXPECT_NE(found.find(c.message), std::string::npos) << c.path << " = " << c.value << ": " << found;
  }
  for (const char* gone : {"/model/vocab/a", "/model", "/model/vocab", "/model/merges", "/pre_tokenizer"}) {
    Json json = parse_json(good, "good");
    const Json::json_pointer at(gone);
    json[at.parent_pointer()].erase(at.back());
    EXPECT_EQ(refusal(write_json(json)).find("bad data: t.json: "), 0u) << "without " << gone;
  }
  Json twice = parse_json(good, "good");
  twice["model"]["merges"].push_back(twice["model"]["merges"][0]);
  EXPECT_NE(refusal(write_json(twice)).find("found twice, also as merge 0"), std::string::npos);
  for (size_t cut = 0; cut < good.size(); cut += 97) EXPECT_NE(refusal(good.substr(0, cut)), "") << "cut at " << cut;
}

}  // namespace
}  // namespace ingot
