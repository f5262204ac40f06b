// Any UTF-8 text becomes ids that decode to the same text, without control tokens, and short texts have the ids of the
// plain definition. The first byte of the input chooses the pattern and the rule of merging; the rest is the text.
#include <map>

#include "ingot/io/utf8.h"
#include "ingot/testing/fuzz.h"
#include "ingot/text/byte_bpe.h"
#include "ingot/text/words.h"

namespace {

using namespace ingot;

constexpr size_t kShort = 300;  // bytes; the time of the plain definition grows with the square of the length

ByteBpe learn(WordPattern pattern, bool by_token) {
  const std::vector<std::string_view> documents = {
      "The quick brown fox jumps over the lazy dog's back; it'll do so 1234 times. aaaaaaaa abababab "
      "<|start|>assistant",
      "The quick fox jumps over the dog. It's 1234! \u65e5\u672c\u8a9e \u65e5\u672c \u0434\u043e\u043c "
      "\u0434\u043e\u043c\n\n\n   aaaa  abab"};
  ByteBpeRules rules =
      train_bpe(documents, 400, {.pattern = pattern, .special_tokens = {"<|start|>", "<|end|>"}}).rules();
  rules.merge_by_token = rules.ignore_merges = by_token;
  return ByteBpe(rules);
}

// The plain definition: repeatedly merge the pair of the lowest rank, the leftmost of equal ranks; with ignore_merges a
// word that is a token stays whole.
std::vector<int32_t> by_definition(const ByteBpeRules& rules, const std::map<std::string, int32_t>& ids,
                                   const std::map<std::pair<int32_t, int32_t>, int32_t>& ranks,
                                   const std::string& word) {
  if (const auto whole = ids.find(word); rules.ignore_merges && whole != ids.end()) return {whole->second};
  std::vector<int32_t> out;
  for (const char c : word) out.push_back(ids.at(std::string(1, c)));
  while (true) {
    int32_t best = INT32_MAX;
    size_t at = 0;
    for (size_t i = 0; i + 1 < out.size(); ++i)
      if (const auto rank = ranks.find({out[i], out[i + 1]}); rank != ranks.end() && rank->second < best)
        best = rank->second, at = i;
    if (best == INT32_MAX) return out;
    out[at] = ids.at(rules.tokens[size_t(out[at])] + rules.tokens[size_t(out[at + 1])]);
    out.erase(out.begin() + int64_t(at) + 1);
  }
}

struct Subject {
  ByteBpe bpe;
  std::map<std::string, int32_t> ids;
  std::map<std::pair<int32_t, int32_t>, int32_t> ranks;
  Subject(WordPattern pattern, bool by_token) : bpe(learn(pattern, by_token)) {
    const ByteBpeRules& r = bpe.rules();
    for (size_t i = 0; i < r.tokens.size(); ++i)
      if (!r.tokens[i].empty()) ids.emplace(r.tokens[i], int32_t(i));
    for (size_t i = 0; i < r.merges.size(); ++i) {
      const std::string joined = r.tokens[size_t(r.merges[i].first)] + r.tokens[size_t(r.merges[i].second)];
      ranks.emplace(r.merges[i], by_token ? ids.at(joined) : int32_t(i));
    }
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const Subject subjects[] = {{WordPattern::o200k, true},  {WordPattern::o200k, false},
                                     {WordPattern::gpt2, false},  {WordPattern::cl100k, false},
                                     {WordPattern::cl100k, true}, {WordPattern::qwen2, false}};
  if (size == 0) return 0;
  const Subject& s = subjects[data[0] % std::size(subjects)];
  const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const bool valid = find_invalid_utf8(text) < 0;
  return testing::refuse_or_accept([&] {
    bool refused = true;
    std::vector<int32_t> ids;
    try {
      ids = s.bpe.encode(text);
      refused = false;
    } catch (const Error&) {}
    FUZZ_REQUIRE(refused == !valid);
    if (refused) return;
    FUZZ_REQUIRE(s.bpe.decode(ids) == text);
    for (const int32_t id : ids) FUZZ_REQUIRE(id >= 2 && id < s.bpe.vocab_size());  // 0 and 1 are control tokens
    if (text.size() > kShort) return;
    std::vector<int32_t> want;
    detail::cut_words(s.bpe.rules().pattern, text, [&](const char* p, const char* q) {
      FUZZ_REQUIRE(q > p);
      const auto word = by_definition(s.bpe.rules(), s.ids, s.ranks, std::string(p, q));
      want.insert(want.end(), word.begin(), word.end());
    });
    FUZZ_REQUIRE(ids == want);
  });
}
