#include "ingot/text/byte_bpe.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>
#include <queue>
#include <unordered_map>

#include "ingot/core/check.h"
#include "ingot/text/nfc.h"
#include "ingot/text/stable_hash.h"
#include "ingot/text/words.h"

namespace ingot {
namespace {

constexpr uint32_t kNoMerge = UINT32_MAX;
constexpr int kMaxTokens = 1 << 24;
constexpr int kShortWord = 64;  // bytes; for shorter words scanning all pairs is faster than keeping them in a heap

struct Merge {
  uint32_t rank = kNoMerge;
  int32_t id = -1;
};

// Maps (left, right) to a merge: open addressing, at most half full.
class MergeTable {
 public:
  void reserve(size_t n) {
    slots_.assign(std::bit_ceil(std::max<size_t>(16, 2 * n)), {});
    shift_ = 64 - std::countr_zero(slots_.size());
  }
  bool insert(int32_t a, int32_t b, Merge merge) {
    Slot& s = slot(key(a, b));
    if (s.merge.rank != kNoMerge) return false;
    s = {key(a, b), merge};
    return true;
  }
  Merge find(int32_t a, int32_t b) const { return const_cast<MergeTable*>(this)->slot(key(a, b)).merge; }

 private:
  struct Slot {
    uint64_t key = 0;
    Merge merge;
  };
  static uint64_t key(int32_t a, int32_t b) { return uint64_t(uint32_t(a)) << 32 | uint32_t(b); }
  Slot& slot(uint64_t k) {
    size_t i = (k * 0x9e3779b97f4a7c15u ^ k) * 0xd6e8feb86659fd93u >> shift_;
    while (slots_[i].merge.rank != kNoMerge && slots_[i].key != k) i = (i + 1) & (slots_.size() - 1);
    return slots_[i];
  }
  std::vector<Slot> slots_;
  int shift_ = 60;
};

// The memory of one encode call: recent words with their ids, and the arrays in which words are merged.
struct Workspace {
  static constexpr int kSets = 1 << 15, kMaxIds = 4, kMaxBytes = 15;
  struct Entry {
    uint64_t low = 0, high = 0;  // the word's bytes, with its length in the last byte; an empty word marks a free entry
    int32_t ids[kMaxIds];        // followed by -1
  };
  struct alignas(64) Set {
    Entry recent, older;
  };
  std::vector<Set> sets = std::vector<Set>(kSets);
  std::vector<int32_t> ids, next, previous;
  std::vector<uint32_t> ranks;
  std::vector<uint64_t> heap;
};

// Finds the occurrences of some texts in a longer text: the leftmost first, and the longest of those at one place.
class AddedTexts {
 public:
  void add(std::string text, int32_t id) {
    auto& list = by_first_[uint8_t(text[0])];
    const auto at = std::find_if(list.begin(), list.end(), [&](const Text& t) { return t.text.size() < text.size(); });
    list.insert(at, {std::move(text), id});
  }
  // Calls found(id) for each occurrence and between(text) for the text between two occurrences, in order.
  template <class Between, class Found> void cut(std::string_view text, Between&& between, Found&& found) const {
    size_t begin = 0;
    for (size_t i = 0; i < text.size();) {
      const Text* match = nullptr;
      for (const Text& t : by_first_[uint8_t(text[i])])
        if (match == nullptr && text.compare(i, t.text.size(), t.text) == 0) match = &t;
      if (match == nullptr) {
        ++i;
        continue;
      }
      if (i > begin) between(text.substr(begin, i - begin));
      found(match->id);
      begin = i += match->text.size();
    }
    if (begin < text.size()) between(text.substr(begin));
  }

 private:
  struct Text {
    std::string text;
    int32_t id;
  };
  std::vector<Text> by_first_[256];  // longest first
};

std::string quoted(std::string_view bytes) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out = "\"";
  for (size_t i = 0; i < bytes.size() && i < 40; ++i) {
    const uint8_t b = uint8_t(bytes[i]);
    if (b >= 32 && b < 127)
      out += char(b);
    else
      out += {'\\', 'x', kHex[b >> 4], kHex[b & 15]};
  }
  return out + (bytes.size() > 40 ? "\"..." : "\"");
}

}  // namespace

int32_t start_token(std::span<const SpecialToken> specials) {
  for (const SpecialToken& s : specials) {
    if (s.id != 0) continue;
    const auto says = [&](const char* word) { return s.text.find(word) != std::string::npos; };
    if (!says("unk") && !says("UNK") && !says("pad") && !says("PAD") && !says("mask") && !says("MASK") &&
        !says("SEP") && !says("</s>") && !says("eos") && !says("EOS"))
      return 0;
  }
  for (const char* name : {"<|bos|>", "<|begin_of_text|>", "<|startoftext|>", "<bos>", "<s>", "<|endoftext|>"})
    for (const SpecialToken& s : specials)
      if (s.text == name) return s.id;
  return -1;
}

struct ByteBpe::Impl {
  ByteBpeRules rules;
  int32_t byte_ids[256];     // -1: the vocabulary has no token for this byte
  bool lacks_bytes = false;  // whether some byte has no token
  MergeTable merges;
  std::unordered_map<std::string_view, int32_t> whole_words;  // with ignore_merges
  std::vector<uint8_t> special;                               // indexed by id
  AddedTexts added, added_normalized;
  int32_t bos = -1;
  uint32_t hash = 0;

  mutable std::mutex mutex;
  mutable std::vector<std::unique_ptr<Workspace>> idle;  // one for each call that has ever run at the same time

  Impl(ByteBpeRules r, const std::string& origin);
  void take_specials(const std::string& origin);
  void take_tokens(std::unordered_map<std::string_view, int32_t>& ids, const std::string& origin);
  void find_merges(const std::unordered_map<std::string_view, int32_t>& ids);
  void take_merges(const std::unordered_map<std::string_view, int32_t>& ids, const std::string& origin);
  void find_bos();
  void make_hash();

  int merge_short(const char* word, int n, int32_t* ids) const;
  int64_t merge_long(const char* word, int64_t n, Workspace& w) const;
  void encode_word(const char* word, int64_t n, Workspace& w, std::vector<int32_t>& out, int64_t& count) const;
  void encode_words(std::string_view text, Workspace& w, std::vector<int32_t>& out) const;
  void encode_text(std::string_view text, Workspace& w, std::vector<int32_t>& out) const;
};

ByteBpe::Impl::Impl(ByteBpeRules r, const std::string& origin) : rules(std::move(r)) {
  if (rules.tokens.size() > size_t(kMaxTokens))
    fail(ErrorCode::bad_data, origin, ": found ", rules.tokens.size(), " tokens, expected at most ", kMaxTokens);
  take_specials(origin);
  std::unordered_map<std::string_view, int32_t> ids;
  for (const AddedToken& a : rules.added) {
    if (a.id < 0 || a.id >= int32_t(rules.tokens.size()) || special[size_t(a.id)])
      fail(ErrorCode::bad_data, origin, ": added token: found id ", a.id, ", expected an ordinary token below ",
           rules.tokens.size());
  }
  take_tokens(ids, origin);
  if (rules.merge_by_token) find_merges(ids);
  take_merges(ids, origin);
  if (rules.ignore_merges) whole_words = std::move(ids);
  for (const AddedToken& a : rules.added) {
    const std::string& text = rules.tokens[size_t(a.id)];
    if (a.normalized && rules.nfc)
      added_normalized.add(to_nfc(text), a.id);
    else
      (a.normalized ? added_normalized : added).add(text, a.id);
  }
  find_bos();
  make_hash();
}

void ByteBpe::Impl::take_specials(const std::string& origin) {
  std::sort(rules.specials.begin(), rules.specials.end(), [](auto& a, auto& b) { return a.id < b.id; });
  std::unordered_map<std::string_view, int32_t> texts;
  int64_t size = int64_t(rules.tokens.size());
  for (const SpecialToken& s : rules.specials) {
    if (s.id < 0 || s.id >= kMaxTokens)
      fail(ErrorCode::bad_data, origin, ": special token ", quoted(s.text), ": found id ", s.id, ", expected 0 to ",
           kMaxTokens - 1);
    if (s.text.empty()) fail(ErrorCode::bad_data, origin, ": special token ", s.id, ": found an empty text");
    if (!texts.emplace(s.text, s.id).second)
      fail(ErrorCode::bad_data, origin, ": special token ", quoted(s.text), " found twice, ids ", texts[s.text],
           " and ", s.id);
    size = std::max<int64_t>(size, s.id + 1);
  }
  // Checked before memory is allocated: ids have no gaps, so there are at least as many entries as the largest id
  // requires.
  if (size > int64_t(rules.tokens.size() + rules.specials.size()))
    fail(ErrorCode::bad_data, origin, ": found ids up to ", size - 1, " but ",
         rules.tokens.size() + rules.specials.size(), " tokens, expected no gaps");
  rules.tokens.resize(size_t(size));
  special.assign(size_t(size), 0);
  for (const SpecialToken& s : rules.specials) {
    if (special[s.id] || !rules.tokens[s.id].empty())
      fail(ErrorCode::bad_data, origin, ": found two tokens with id ", s.id, ", one of them special token ",
           quoted(s.text));
    special[s.id] = 1;
  }
}

void ByteBpe::Impl::take_tokens(std::unordered_map<std::string_view, int32_t>& ids, const std::string& origin) {
  ids.reserve(rules.tokens.size());
  std::fill(std::begin(byte_ids), std::end(byte_ids), -1);
  std::vector<bool> is_added(rules.tokens.size());
  for (const AddedToken& a : rules.added) is_added[size_t(a.id)] = true;
  for (size_t i = 0; i < rules.tokens.size(); ++i) {
    const std::string& token = rules.tokens[i];
    if (special[i]) continue;
    if (token.empty())
      fail(ErrorCode::bad_data, origin, ": found no token with id ", i, ", expected no gaps below ",
           rules.tokens.size());
    if (is_added[i]) continue;
    const auto [at, is_new] = ids.emplace(token, int32_t(i));
    if (!is_new)
      fail(ErrorCode::bad_data, origin, ": token ", quoted(token), " found twice, ids ", at->second, " and ", i);
    if (token.size() == 1) byte_ids[uint8_t(token[0])] = int32_t(i);
  }
  // An added token may have the bytes of another token; merges then produce the other token.
  for (const AddedToken& a : rules.added) ids.emplace(rules.tokens[size_t(a.id)], a.id);
  // Some vocabularies, such as SmolLM2's, lack bytes that hardly any text contains. encode() refuses these bytes.
  for (int b = 0; b < 256; ++b) {
    if (byte_ids[b] >= 0) continue;
    lacks_bytes = true;
    if (rules.merge_by_token || (b >= ' ' && b <= '~') || b == '\n')
      fail(ErrorCode::bad_data, origin, ": found no token for byte ", b, ", expected one for each of the 256 bytes");
  }
}

// Finds every pair of tokens whose joined bytes are a token, in the order of the joined tokens.
void ByteBpe::Impl::find_merges(const std::unordered_map<std::string_view, int32_t>& ids) {
  rules.merges.clear();
  for (const std::string& token : rules.tokens) {
    const size_t first = rules.merges.size();
    for (size_t cut = 1; cut < token.size(); ++cut) {
      const auto left = ids.find(std::string_view(token).substr(0, cut));
      if (left == ids.end()) continue;
      const auto right = ids.find(std::string_view(token).substr(cut));
      if (right != ids.end()) rules.merges.emplace_back(left->second, right->second);
    }
    std::sort(rules.merges.begin() + int64_t(first), rules.merges.end());
  }
}

void ByteBpe::Impl::take_merges(const std::unordered_map<std::string_view, int32_t>& ids, const std::string& origin) {
  merges.reserve(rules.merges.size());
  const int32_t size = int32_t(rules.tokens.size());
  std::string joined;
  for (size_t rank = 0; rank < rules.merges.size(); ++rank) {
    const auto [a, b] = rules.merges[rank];
    for (int32_t id : {a, b})
      if (id < 0 || id >= size || special[id])
        fail(ErrorCode::bad_data, origin, ": merge ", rank, ": found id ", id, ", expected an ordinary token below ",
             size);
    joined = rules.tokens[a] + rules.tokens[b];
    const auto at = ids.find(joined);
    if (at == ids.end())
      fail(ErrorCode::bad_data, origin, ": merge ", rank, " of ", quoted(rules.tokens[a]), " and ",
           quoted(rules.tokens[b]), ": found no token for their joined bytes");
    const uint32_t order = rules.merge_by_token ? uint32_t(at->second) : uint32_t(rank);
    if (!merges.insert(a, b, {order, at->second}))
      fail(ErrorCode::bad_data, origin, ": merge ", rank, " of ", quoted(rules.tokens[a]), " and ",
           quoted(rules.tokens[b]), " found twice, also as merge ", merges.find(a, b).rank);
  }
}

void ByteBpe::Impl::find_bos() { bos = start_token(rules.specials); }

void ByteBpe::Impl::make_hash() {
  detail::StableHash h;
  h.bytes("byte_bpe");
  h.bytes(word_pattern_name(rules.pattern));
  h.number(rules.ignore_merges);
  if (rules.merge_by_token) h.bytes("merge_by_token");
  h.number(int64_t(rules.tokens.size()));
  for (const std::string& t : rules.tokens) h.bytes(t);
  h.number(int64_t(rules.merges.size()));
  for (const auto& [a, b] : rules.merges) {
    h.number(a);
    h.number(b);
  }
  for (const SpecialToken& s : rules.specials) {
    h.number(s.id);
    h.bytes(s.text);
  }
  if (rules.nfc) h.bytes("nfc");
  if (!rules.added.empty()) h.bytes("added");
  for (const AddedToken& a : rules.added) {
    h.number(a.id);
    h.number(a.normalized);
  }
  hash = h.value();
}

// Merges in place, lowest rank first and leftmost on ties. `ids` has room for n ids; returns the number of ids left.
int ByteBpe::Impl::merge_short(const char* word, int n, int32_t* ids) const {
  Merge pairs[kShortWord];  // pairs[i] joins ids[i] and ids[i + 1]
  for (int i = 0; i < n; ++i) ids[i] = byte_ids[uint8_t(word[i])];
  for (int i = 0; i + 1 < n; ++i) pairs[i] = merges.find(ids[i], ids[i + 1]);
  while (n > 1) {
    int best = 0;
    for (int i = 1; i + 1 < n; ++i)
      if (pairs[i].rank < pairs[best].rank) best = i;
    if (pairs[best].rank == kNoMerge) break;
    ids[best] = pairs[best].id;
    --n;
    std::memmove(ids + best + 1, ids + best + 2, size_t(n - best - 1) * sizeof *ids);
    if (best + 1 < n) {
      std::memmove(pairs + best + 1, pairs + best + 2, size_t(n - best - 2) * sizeof *pairs);
      pairs[best] = merges.find(ids[best], ids[best + 1]);
    }
    if (best > 0) pairs[best - 1] = merges.find(ids[best - 1], ids[best]);
  }
  return n;
}

// Merges words of any length in O(n log n): a heap of (rank, position), whose outdated entries are skipped, and a
// linked list of the remaining ids. The result is in w.ids.
int64_t ByteBpe::Impl::merge_long(const char* word, int64_t n, Workspace& w) const {
  INGOT_CHECK(n < INT32_MAX, "encode: found one word of ", n, " bytes, expected fewer than ", INT32_MAX);
  w.ids.resize(n), w.next.resize(n), w.previous.resize(n), w.ranks.resize(n);
  w.heap.clear();
  const auto push = [&](int64_t at, uint32_t rank) {
    w.ranks[at] = rank;
    if (rank != kNoMerge) w.heap.push_back(uint64_t(rank) << 32 | uint64_t(at));
  };
  for (int64_t i = 0; i < n; ++i) {
    w.ids[i] = byte_ids[uint8_t(word[i])];
    w.next[i] = int32_t(i + 1);
    w.previous[i] = int32_t(i - 1);
  }
  w.ranks[n - 1] = kNoMerge;
  for (int64_t i = 0; i + 1 < n; ++i) push(i, merges.find(w.ids[i], w.ids[i + 1]).rank);
  std::make_heap(w.heap.begin(), w.heap.end(), std::greater<>());
  const auto refresh = [&](int64_t at) {
    const int64_t after = w.next[at];
    const uint32_t rank = after < n ? merges.find(w.ids[at], w.ids[after]).rank : kNoMerge;
    const size_t before = w.heap.size();
    push(at, rank);
    if (w.heap.size() > before) std::push_heap(w.heap.begin(), w.heap.end(), std::greater<>());
  };
  while (!w.heap.empty()) {
    const uint64_t top = w.heap.front();
    std::pop_heap(w.heap.begin(), w.heap.end(), std::greater<>());
    w.heap.pop_back();
    const int64_t at = int64_t(top & 0xffffffff);
    if (w.ranks[at] != uint32_t(top >> 32)) continue;
    const int64_t gone = w.next[at];
    w.ids[at] = merges.find(w.ids[at], w.ids[gone]).id;
    w.ranks[gone] = kNoMerge;
    w.next[at] = w.next[gone];
    if (w.next[at] < n) w.previous[w.next[at]] = int32_t(at);
    refresh(at);
    if (w.previous[at] >= 0) refresh(w.previous[at]);
  }
  int64_t left = 0;
  for (int64_t i = 0; i < n; i = w.next[i]) w.ids[left++] = w.ids[i];
  return left;
}

void ByteBpe::Impl::encode_word(const char* word, int64_t n, Workspace& w, std::vector<int32_t>& out,
                                int64_t& count) const {
  if (rules.ignore_merges) {
    const auto whole = whole_words.find({word, size_t(n)});
    if (whole != whole_words.end()) {
      out[count++] = whole->second;
      return;
    }
  }
  if (n <= kShortWord) {
    count += merge_short(word, int(n), out.data() + count);
    return;
  }
  const int64_t left = merge_long(word, n, w);
  std::copy_n(w.ids.begin(), left, out.begin() + count);
  count += left;
}

void ByteBpe::Impl::encode_words(std::string_view text, Workspace& w, std::vector<int32_t>& out) const {
  const char* const end = text.data() + text.size();
  auto count = int64_t(out.size());
  out.resize(out.size() + std::max<size_t>(text.size() / 3, 64));
  detail::cut_words(rules.pattern, text, [&](const char* p, const char* q) {
    const int64_t n = q - p;
    if (int64_t(out.size()) - count < std::max<int64_t>(n, Workspace::kMaxIds))
      out.resize(out.size() + out.size() / 2 + size_t(n));
    if (n > Workspace::kMaxBytes) return encode_word(p, n, w, out, count);
    uint64_t low = 0, high = 0;
    if (end - p >= 16) {
      std::memcpy(&low, p, 8);
      std::memcpy(&high, p + 8, 8);
      if (n < 8)
        low &= (uint64_t(1) << 8 * n) - 1, high = 0;
      else
        high &= (uint64_t(1) << 8 * (n - 8)) - 1;
    } else {
      std::memcpy(&low, p, size_t(std::min<int64_t>(n, 8)));
      if (n > 8) std::memcpy(&high, p + 8, size_t(n - 8));
    }
    high |= uint64_t(n) << 56;
    Workspace::Set& set = w.sets[detail::mix(low ^ 0xa0761d6478bd642fu, high ^ 0xe7037ed1a0b428dbu) >> 49];
    static_assert(Workspace::kSets == 1 << (64 - 49), "the set's number is the top bits of the hash");
    const Workspace::Entry* hit = nullptr;
    if (set.recent.low == low && set.recent.high == high)
      hit = &set.recent;
    else if (set.older.low == low && set.older.high == high)
      hit = &set.older;
    if (hit) {
      std::memcpy(out.data() + count, hit->ids, sizeof hit->ids);
      count += 1 + (hit->ids[1] >= 0) + (hit->ids[2] >= 0) + (hit->ids[3] >= 0);
      return;
    }
    const int64_t before = count;
    encode_word(p, n, w, out, count);
    if (count - before > Workspace::kMaxIds) return;
    set.older = set.recent;
    set.recent.low = low;
    set.recent.high = high;
    for (int i = 0; i < Workspace::kMaxIds; ++i) set.recent.ids[i] = before + i < count ? out[before + i] : -1;
  });
  out.resize(size_t(count));
}

// Added tokens are first searched in the text as given, then the normalized ones in the normalized text in between.
void ByteBpe::Impl::encode_text(std::string_view text, Workspace& w, std::vector<int32_t>& out) const {
  if (rules.added.empty() && !rules.nfc) return encode_words(text, w, out);
  const auto found = [&](int32_t id) { out.push_back(id); };
  const auto words = [&](std::string_view part) { encode_words(part, w, out); };
  const auto between = [&](std::string_view part) {
    if (rules.nfc)
      added_normalized.cut(to_nfc(part), words, found);
    else
      added_normalized.cut(part, words, found);
  };
  added.cut(text, between, found);
}

ByteBpe::ByteBpe(ByteBpeRules rules, const std::string& origin)
    : impl_(std::make_unique<Impl>(std::move(rules), origin)) {}
ByteBpe::~ByteBpe() = default;
ByteBpe::ByteBpe(ByteBpe&&) noexcept = default;
ByteBpe& ByteBpe::operator=(ByteBpe&&) noexcept = default;

const ByteBpeRules& ByteBpe::rules() const { return impl_->rules; }
int32_t ByteBpe::bos() const { return impl_->bos; }
int32_t ByteBpe::token_id(std::string_view text) const {
  if (const int32_t id = Tokenizer::token_id(text); id >= 0) return id;
  for (const AddedToken& a : rules().added)
    if (rules().tokens[size_t(a.id)] == text) return a.id;
  return -1;
}
int ByteBpe::vocab_size() const { return int(impl_->rules.tokens.size()); }
uint32_t ByteBpe::hash() const { return impl_->hash; }

std::vector<int32_t> ByteBpe::encode(std::string_view text) const {
  require_utf8(text, "text to encode");
  std::vector<int32_t> out;
  if (text.empty()) return out;
  for (size_t i = 0; impl_->lacks_bytes && i < text.size(); ++i)
    if (impl_->byte_ids[uint8_t(text[i])] < 0)
      fail(ErrorCode::bad_data, "text to encode: found byte ", int(uint8_t(text[i])), " at offset ", i,
           ", for which the tokenizer has no token");
  std::unique_ptr<Workspace> w;
  {
    std::lock_guard lock(impl_->mutex);
    if (!impl_->idle.empty()) {
      w = std::move(impl_->idle.back());
      impl_->idle.pop_back();
    }
  }
  if (!w) w = std::make_unique<Workspace>();
  impl_->encode_text(text, *w, out);
  if (w->ids.capacity() > (1 << 20)) return out;  // frees the memory of a very long word
  std::lock_guard lock(impl_->mutex);
  impl_->idle.push_back(std::move(w));
  return out;
}

std::string ByteBpe::decode(std::span<const int32_t> ids) const {
  std::string out;
  for (int32_t id : ids) {
    INGOT_CHECK(id >= 0 && id < vocab_size(), "decode: found id ", id, ", expected 0 to ", vocab_size() - 1);
    out += impl_->rules.tokens[id];  // empty for special tokens
  }
  return out;
}

int64_t ByteBpe::bytes(int32_t, int32_t id) const {
  INGOT_CHECK(id >= 0 && id < vocab_size(), "bytes: found id ", id, ", expected 0 to ", vocab_size() - 1);
  return int64_t(impl_->rules.tokens[id].size());
}

std::string ByteBpe::token_bytes(int32_t id) const {
  INGOT_CHECK(id >= 0 && id < vocab_size(), "token_bytes: found id ", id, ", expected 0 to ", vocab_size() - 1);
  for (const SpecialToken& s : impl_->rules.specials)
    if (s.id == id) return s.text;
  return impl_->rules.tokens[id];
}

}  // namespace ingot
