#include "ingot/text/nfc.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

#include "ingot/text/utf8.h"

namespace ingot {
namespace detail {
extern const uint32_t kDecompositions[];
extern const int kDecompositionCount;
extern const uint32_t kCombiningRuns[];
extern const int kCombiningRunCount;
}  // namespace detail

namespace {

constexpr char32_t kCodes = 0x110000;
// A Hangul syllable is composed arithmetically of a leading consonant, a vowel and an optional trailing consonant.
constexpr char32_t kSyllable = 0xAC00, kLeading = 0x1100, kVowel = 0x1161, kTrailing = 0x11A7;
constexpr char32_t kLeadings = 19, kVowels = 21, kTrailings = 28, kSyllables = kLeadings * kVowels * kTrailings;

struct Parts {
  char32_t first, second;  // second: 0 for a single part
};

struct Tables {
  std::vector<uint8_t> combining = std::vector<uint8_t>(kCodes);  // 0: a starter
  std::vector<bool> inert = std::vector<bool>(kCodes, true);      // never changed, also not together with a neighbour
  std::unordered_map<char32_t, Parts> parts;
  std::unordered_map<uint64_t, char32_t> composed;

  static uint64_t key(char32_t a, char32_t b) { return uint64_t(a) << 32 | b; }
  Tables() {
    for (int i = 0; i < detail::kCombiningRunCount; ++i) {
      const uint32_t begin = detail::kCombiningRuns[i] >> 8;
      const uint32_t end = i + 1 < detail::kCombiningRunCount ? detail::kCombiningRuns[i + 1] >> 8 : uint32_t(kCodes);
      std::fill(combining.begin() + begin, combining.begin() + end, uint8_t(detail::kCombiningRuns[i]));
    }
    for (int i = 0; i < detail::kDecompositionCount; ++i) {
      const uint32_t* step = detail::kDecompositions + 3 * i;
      const Parts p = {step[1], step[2]};
      parts.emplace(step[0] >> 1, p);
      if (step[0] & 1) composed.emplace(key(p.first, p.second), step[0] >> 1);
      // A composite stays as it is unless a mark follows, and marks are not inert.
      if (!(step[0] & 1)) inert[step[0] >> 1] = false;
      if (step[0] & 1) inert[p.second] = false;
    }
    for (char32_t c = 0; c < kCodes; ++c)
      if (combining[c] != 0) inert[c] = false;
    for (char32_t c = kVowel; c < kTrailing + kTrailings; ++c) inert[c] = false;
  }
};
const Tables& tables() {
  static const Tables t;
  return t;
}

void decompose(char32_t c, std::vector<char32_t>& out) {
  if (c >= kSyllable && c < kSyllable + kSyllables) {
    const char32_t index = c - kSyllable, trailing = index % kTrailings;
    out.push_back(kLeading + index / (kVowels * kTrailings));
    out.push_back(kVowel + index / kTrailings % kVowels);
    if (trailing != 0) out.push_back(kTrailing + trailing);
    return;
  }
  const auto at = tables().parts.find(c);
  if (at == tables().parts.end()) return out.push_back(c);
  decompose(at->second.first, out);
  if (at->second.second != 0) decompose(at->second.second, out);
}

// The composition of two characters, or 0.
char32_t compose(char32_t a, char32_t b) {
  if (a >= kLeading && a < kLeading + kLeadings && b >= kVowel && b < kVowel + kVowels)
    return kSyllable + ((a - kLeading) * kVowels + (b - kVowel)) * kTrailings;
  if (a >= kSyllable && a < kSyllable + kSyllables && (a - kSyllable) % kTrailings == 0 && b > kTrailing &&
      b < kTrailing + kTrailings)
    return a + (b - kTrailing);
  const auto at = tables().composed.find(Tables::key(a, b));
  return at == tables().composed.end() ? 0 : at->second;
}

// Marks between two starters, by their class; equal classes keep their order.
void order_marks(std::vector<char32_t>& codes) {
  const auto& combining = tables().combining;
  for (size_t i = 0; i < codes.size();) {
    if (combining[codes[i]] == 0) {
      ++i;
      continue;
    }
    size_t end = i;
    while (end < codes.size() && combining[codes[end]] != 0) ++end;
    std::stable_sort(codes.begin() + int64_t(i), codes.begin() + int64_t(end),
                     [&](char32_t a, char32_t b) { return combining[a] < combining[b]; });
    i = end;
  }
}

// Each character joins the last starter, unless a mark of its own or a higher class stands between the two.
void compose_all(std::vector<char32_t>& codes) {
  const auto& combining = tables().combining;
  size_t kept = 0;
  int64_t starter = -1;
  int last = -1;  // the class of the mark between the starter and the character; -1: no mark
  for (const char32_t c : codes) {
    const int kind = combining[c];
    if (starter >= 0 && last < kind)
      if (const char32_t both = compose(codes[size_t(starter)], c); both != 0) {
        codes[size_t(starter)] = both;
        continue;
      }
    codes[kept++] = c;
    if (kind == 0)
      starter = int64_t(kept) - 1, last = -1;
    else
      last = kind;
  }
  codes.resize(kept);
}

}  // namespace

std::string to_nfc(std::string_view text) {
  const auto changes = [](char32_t c) { return c >= 0x300 && !tables().inert[c]; };
  bool plain = true;
  for (size_t i = 0; i < text.size() && plain;) {
    const Utf8Char c = utf8_decode(text.data() + i);
    plain = !changes(c.code);
    i += size_t(c.length);
  }
  if (plain) return std::string(text);
  std::vector<char32_t> codes;
  codes.reserve(text.size());
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = utf8_decode(text.data() + i);
    decompose(c.code, codes);
    i += size_t(c.length);
  }
  order_marks(codes);
  compose_all(codes);
  std::string out;
  out.reserve(text.size());
  for (const char32_t c : codes) utf8_append(out, c);
  return out;
}

}  // namespace ingot
