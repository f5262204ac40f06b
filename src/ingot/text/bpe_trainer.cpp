// Trains a byte-level BPE: counts the distinct words once, then repeatedly merges the most frequent pair in the
// distinct words that contain the pair, and corrects the counts of the neighbouring pairs.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <set>
#include <unordered_map>

#include "ingot/core/check.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/text/byte_alphabet.h"
#include "ingot/text/byte_bpe.h"
#include "ingot/text/utf8.h"
#include "ingot/text/words.h"

namespace ingot {
namespace {

constexpr size_t kChunk = 256 << 10;  // bytes of text counted at a time
constexpr int kMaxVocab = 1 << 24;

// How often each distinct word occurs. The words are views of the documents.
class WordCounts {
 public:
  struct Word {
    std::string_view bytes;
    uint64_t hash = 0;
    int64_t count = 0;
  };
  void add(std::string_view bytes, uint64_t hash, int64_t count) {
    if (2 * used_ >= slots_.size()) grow();
    Word& w = slots_[find(bytes, hash)];
    if (w.count == 0) {
      w.bytes = bytes;
      w.hash = hash;
      ++used_;
    }
    w.count += count;
  }
  template <class Body> void each(Body&& body) const {
    for (const Word& w : slots_)
      if (w.count > 0) body(w);
  }
  size_t size() const { return used_; }

 private:
  size_t find(std::string_view bytes, uint64_t hash) const {
    size_t i = hash & (slots_.size() - 1);
    while (slots_[i].count > 0 && (slots_[i].hash != hash || slots_[i].bytes != bytes))
      i = (i + 1) & (slots_.size() - 1);
    return i;
  }
  void grow() {
    std::vector<Word> old(slots_.size() * 4);
    old.swap(slots_);
    for (const Word& w : old)
      if (w.count > 0) slots_[find(w.bytes, w.hash)] = w;
  }
  std::vector<Word> slots_ = std::vector<Word>(1 << 12);
  size_t used_ = 0;
};

// Cuts the documents into chunks of about kChunk bytes, at places where every pattern starts a new word whatever
// precedes: before the space in "letter space letter". Text without such a place stays whole.
std::vector<std::string_view> cut_chunks(std::span<const std::string_view> documents) {
  const auto letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
  std::vector<std::string_view> chunks;
  for (std::string_view rest : documents) {
    for (size_t at = kChunk; at + 1 < rest.size(); ++at)
      if (rest[at] == ' ' && letter(rest[at - 1]) && letter(rest[at + 1])) {
        chunks.push_back(rest.substr(0, at));
        rest.remove_prefix(at);
        at = kChunk;
      }
    if (!rest.empty()) chunks.push_back(rest);
  }
  return chunks;
}

// Counts are sums of integers, so the result does not depend on which thread counts which chunk.
WordCounts count_words(std::span<const std::string_view> documents, WordPattern pattern) {
  const std::vector<std::string_view> chunks = cut_chunks(documents);
  std::vector<WordCounts> parts(std::max<size_t>(1, std::min<size_t>(chunks.size(), size_t(thread_count()))));
  std::atomic<size_t> next = 0;
  parallel_tasks(int64_t(parts.size()), [&](int64_t task) {
    WordCounts& counts = parts[size_t(task)];
    for (size_t i; (i = next.fetch_add(1)) < chunks.size();)
      detail::cut_words(pattern, chunks[i], [&](const char* p, const char* q) {
        counts.add({p, size_t(q - p)}, detail::hash_bytes(p, size_t(q - p)), 1);
      });
  });
  for (size_t i = 1; i < parts.size(); ++i)
    parts[i].each([&](const WordCounts::Word& w) { parts[0].add(w.bytes, w.hash, w.count); });
  return std::move(parts[0]);
}

struct Pair {
  uint64_t key;
  int64_t count = 0;
  // The words that contained the pair at the last count; later merges may have removed the pair from some words.
  std::vector<int32_t> words;
};
constexpr uint64_t pair_key(int32_t a, int32_t b) { return uint64_t(uint32_t(a)) << 32 | uint32_t(b); }

// All pairs ever seen, found by key; the index of a pair never changes.
class PairTable {
 public:
  Pair& operator()(uint64_t key) {
    if (2 * pairs_.size() >= slots_.size()) grow();
    uint32_t& slot = find(key);
    if (slot == 0) {
      pairs_.push_back({.key = key, .words = {}});
      slot = uint32_t(pairs_.size());
    }
    return pairs_[slot - 1];
  }
  const std::vector<Pair>& all() const { return pairs_; }

 private:
  uint32_t& find(uint64_t key) {
    size_t i = detail::mix(key ^ 0xa0761d6478bd642fu, 0xe7037ed1a0b428dbu) & (slots_.size() - 1);
    while (slots_[i] != 0 && pairs_[slots_[i] - 1].key != key) i = (i + 1) & (slots_.size() - 1);
    return slots_[i];
  }
  void grow() {
    slots_.assign(slots_.size() * 4, 0);
    for (size_t i = 0; i < pairs_.size(); ++i) find(pairs_[i].key) = uint32_t(i + 1);
  }
  std::vector<Pair> pairs_;
  std::vector<uint32_t> slots_ = std::vector<uint32_t>(1 << 14);  // hash table of index + 1; 0 is free
};

class Trainer {
 public:
  Trainer(const WordCounts& counts, const std::vector<int32_t>& byte_ids);
  struct Best {
    int64_t count = 0;
    uint64_t key = 0;
    // The larger count comes first, then the smaller left id, then the smaller right id.
    bool operator<(const Best& o) const { return count != o.count ? count < o.count : key > o.key; }
  };
  bool pop(int64_t min_count, Best& best);
  void merge(uint64_t key, int32_t id);

 private:
  struct Word {
    int64_t at;  // index in symbols_
    int32_t length;
    int64_t count;
  };
  void change(int32_t a, int32_t b, int64_t by, int32_t word);
  void merge_word(int32_t word, int32_t a, int32_t b, int32_t id);

  std::vector<int32_t> symbols_;
  std::vector<Word> words_;
  PairTable pairs_;
  std::vector<Best> heap_;        // counts may have fallen since; an entry is corrected when it reaches the top
  std::vector<uint64_t> raised_;  // pairs whose count rose in the current merge
};

Trainer::Trainer(const WordCounts& counts, const std::vector<int32_t>& byte_ids) {
  words_.reserve(counts.size());
  counts.each([&](const WordCounts::Word& w) {
    INGOT_CHECK(w.bytes.size() < size_t(INT32_MAX), "train_bpe: found one word of ", w.bytes.size(),
                " bytes, expected fewer than ", INT32_MAX);
    words_.push_back({int64_t(symbols_.size()), int32_t(w.bytes.size()), w.count});
    for (char c : w.bytes) symbols_.push_back(byte_ids[uint8_t(c)]);
  });
  INGOT_CHECK(words_.size() < size_t(INT32_MAX), "train_bpe: found ", words_.size(),
              " distinct words, expected fewer than ", INT32_MAX);
  for (size_t w = 0; w < words_.size(); ++w)
    for (int32_t i = 0; i + 1 < words_[w].length; ++i) {
      const int32_t* s = &symbols_[size_t(words_[w].at + i)];
      change(s[0], s[1], words_[w].count, int32_t(w));
    }
  raised_.clear();
  for (const Pair& p : pairs_.all()) heap_.push_back({p.count, p.key});
  std::make_heap(heap_.begin(), heap_.end());
}

void Trainer::change(int32_t a, int32_t b, int64_t by, int32_t word) {
  Pair& p = pairs_(pair_key(a, b));
  p.count += by;
  if (by < 0) return;
  if (p.words.empty() || p.words.back() != word) p.words.push_back(word);
  raised_.push_back(p.key);
}

bool Trainer::pop(int64_t min_count, Best& best) {
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end());
    best = heap_.back();
    const int64_t now = pairs_(best.key).count;
    if (now == best.count) {
      heap_.pop_back();
      return best.count >= std::max<int64_t>(1, min_count);
    }
    if (now > 0) {
      heap_.back().count = now;
      std::push_heap(heap_.begin(), heap_.end());
    } else {
      heap_.pop_back();
    }
  }
  return false;
}

void Trainer::merge_word(int32_t word, int32_t a, int32_t b, int32_t id) {
  Word& w = words_[size_t(word)];
  int32_t* s = &symbols_[size_t(w.at)];
  int32_t left = 0;
  for (int32_t i = 0; i < w.length; ++i) {
    if (s[i] != a || i + 1 >= w.length || s[i + 1] != b) {
      s[left++] = s[i];
      continue;
    }
    if (left > 0) {
      change(s[left - 1], a, -w.count, word);
      change(s[left - 1], id, w.count, word);
    }
    if (i + 2 < w.length) {
      change(b, s[i + 2], -w.count, word);
      change(id, s[i + 2], w.count, word);
    }
    s[left++] = id;
    ++i;
  }
  w.length = left;
}

void Trainer::merge(uint64_t key, int32_t id) {
  const int32_t a = int32_t(key >> 32), b = int32_t(key & 0xffffffff);
  const std::vector<int32_t> words = std::move(pairs_(key).words);
  raised_.clear();
  for (int32_t word : words) merge_word(word, a, b, id);
  pairs_(key).count = 0;
  pairs_(key).words.clear();
  std::sort(raised_.begin(), raised_.end());
  raised_.erase(std::unique(raised_.begin(), raised_.end()), raised_.end());
  for (uint64_t k : raised_) {
    const int64_t count = pairs_(k).count;
    if (count <= 0) continue;
    heap_.push_back({count, k});
    std::push_heap(heap_.begin(), heap_.end());
  }
}

std::string spelling_of(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) utf8_append(out, detail::kByteToChar[uint8_t(c)]);
  return out;
}

// Refuses special tokens that a file could not represent, or whose text would be read differently.
void check_specials(const std::vector<std::string>& specials) {
  std::set<std::string> bytes;
  for (int b = 0; b < 256; ++b) bytes.insert(spelling_of(std::string(1, char(b))));
  std::vector<SpecialToken> all;
  for (const std::string& text : specials) {
    require_utf8(text, "special token");
    if (text.empty()) fail(ErrorCode::usage, "special tokens: found an empty text, expected a name like <|bos|>");
    if (bytes.contains(text))
      fail(ErrorCode::usage, "special tokens: found '", text,
           "', which is how a tokenizer.json spells a byte; expected a name like <|bos|>");
    for (const SpecialToken& s : all)
      if (s.text == text) fail(ErrorCode::usage, "special tokens: found '", text, "' twice, expected each once");
    all.push_back({int32_t(all.size()), text});
  }
  if (const int32_t start = start_token(all); !all.empty() && start != 0)
    fail(ErrorCode::usage, "special tokens: found '", all[0].text,
         "' first, whose name says that it starts no document",
         start > 0 ? detail::concat("; expected '", all[size_t(start)].text, "' first") : std::string());
}

// The first tokens: special tokens, then the bytes in the order of their characters.
ByteBpeRules first_tokens(const BpeTrainOptions& options) {
  ByteBpeRules rules;
  rules.pattern = options.pattern;
  for (const std::string& text : options.special_tokens) {
    rules.specials.push_back({int32_t(rules.tokens.size()), text});
    rules.tokens.emplace_back();
  }
  for (uint8_t b : detail::kAlphabetOrder) rules.tokens.emplace_back(1, char(b));
  return rules;
}

}  // namespace

ByteBpe train_bpe(std::span<const std::string_view> documents, int vocab_size, const BpeTrainOptions& options) {
  const int smallest = 256 + int(options.special_tokens.size());
  INGOT_CHECK(vocab_size >= smallest && vocab_size <= kMaxVocab, "train_bpe: found vocab_size ", vocab_size,
              ", expected ", smallest, " (the bytes and the special tokens) to ", kMaxVocab);
  check_specials(options.special_tokens);
  const std::set<std::string> specials(options.special_tokens.begin(), options.special_tokens.end());
  for (size_t i = 0; i < documents.size(); ++i) require_utf8(documents[i], "train_bpe: document " + std::to_string(i));

  ByteBpeRules rules = first_tokens(options);
  std::vector<int32_t> byte_ids(256);
  std::unordered_map<std::string, int32_t> ids;
  for (size_t i = options.special_tokens.size(); i < rules.tokens.size(); ++i) {
    byte_ids[uint8_t(rules.tokens[i][0])] = int32_t(i);
    ids.emplace(rules.tokens[i], int32_t(i));
  }
  Trainer trainer(count_words(documents, options.pattern), byte_ids);
  const int64_t goal = vocab_size - smallest;
  Trainer::Best best;
  while (int(rules.tokens.size()) < vocab_size && trainer.pop(options.min_count, best)) {
    const int32_t a = int32_t(best.key >> 32), b = int32_t(best.key & 0xffffffff);
    std::string joined = rules.tokens[size_t(a)] + rules.tokens[size_t(b)];
    if (specials.contains(spelling_of(joined))) continue;  // a file cannot hold two tokens of the same spelling
    // Two pairs may join to the same bytes: "a" + "bc" and "ab" + "c" are the same token.
    const auto [at, is_new] = ids.emplace(joined, int32_t(rules.tokens.size()));
    if (is_new) rules.tokens.push_back(std::move(joined));
    rules.merges.emplace_back(a, b);
    trainer.merge(best.key, at->second);
    const int64_t done = int64_t(rules.tokens.size()) - smallest;
    if (options.progress && (done % 256 == 0 || done == goal)) options.progress(options.context, done, goal);
  }
  return ByteBpe(std::move(rules), "train_bpe");
}

}  // namespace ingot
