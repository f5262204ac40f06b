#pragma once
// The word patterns as hand-written matchers: next_PATTERN returns the end of the word that starts at `p`. The first
// characters decide on the alternative, which is scanned once (only o200k goes back, to a position that it remembered),
// so cutting takes linear time for any text. Input must be valid UTF-8.
#include "ingot/text/byte_bpe.h"
#include "ingot/text/unicode.h"
#include "ingot/text/utf8.h"

namespace ingot::detail {

struct WordCutter {
  const uint8_t* classes = char_classes();
  const char* end = nullptr;

  // The class of the character at `p`, and the start of the next character. At the end of the text: class 0 and p
  // itself.
  struct Seen {
    uint8_t kind;
    const char* next;
  };
  Seen look(const char* p) const {
    if (p == end) return {0, p};
    if (uint8_t(*p) < 0x80) return {classes[uint8_t(*p)], p + 1};
    const Utf8Char c = utf8_decode(p);
    return {classes[c.code], p + c.length};
  }
  template <class Wanted> const char* run(const char* p, Wanted wanted) const {
    while (p != end) {
      const Seen s = look(p);
      if (!wanted(s.kind)) break;
      p = s.next;
    }
    return p;
  }
  const char* letters(const char* p) const {
    return run(p, [](uint8_t k) { return (k & kLetter) != 0; });
  }
  const char* numbers(const char* p) const {
    return run(p, [](uint8_t k) { return (k & kNumber) != 0; });
  }
  const char* numbers_up_to(const char* p, int most) const {
    for (int i = 0; i < most && p != end; ++i) {
      const Seen s = look(p);
      if (!(s.kind & kNumber)) break;
      p = s.next;
    }
    return p;
  }
  // [^\s\p{L}\p{N}]+
  const char* others(const char* p) const {
    return run(p, [](uint8_t k) { return (k & (kLetter | kNumber | kSpace)) == 0; });
  }
  const char* newlines(const char* p, char also = '\n') const {
    while (p != end && (*p == '\r' || *p == '\n' || *p == also)) ++p;
    return p;
  }
  // 's|'t|'re|'ve|'m|'ll|'d at `p`, or null. Where case is ignored, U+017F (long s) counts as an s, as in Unicode's
  // case folding.
  const char* contraction(const char* p, bool any_case) const {
    if (end - p < 2 || *p != '\'') return nullptr;
    const auto lower = [&](const char* q) { return any_case && *q >= 'A' && *q <= 'Z' ? char(*q + 32) : *q; };
    const char a = lower(p + 1);
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return p + 2;
    if (end - p < 3) return nullptr;
    if (any_case && p[1] == '\xc5' && p[2] == '\xbf') return p + 3;
    const char b = lower(p + 2);
    if ((a == 'r' || a == 'v') && b == 'e') return p + 3;
    if (a == 'l' && b == 'l') return p + 3;
    return nullptr;
  }
  // \s+(?!\S)|\s+ at whitespace: the whole run at the end of the text, else all but its last character, or a run of one
  // character.
  const char* spaces(const char* p) const {
    const char* last = p;
    const char* q = p;
    for (Seen s = look(q); s.kind & kSpace; s = look(q)) {
      last = q;
      q = s.next;
    }
    return q == end || last == p ? q : last;
  }
  // \s*[\r\n]+|\s+(?!\S)|\s+ at whitespace: up to the last newline of a run that contains one.
  const char* spaces_to_newline(const char* p) const {
    const char *last = p, *after_newline = nullptr, *q = p;
    for (Seen s = look(q); s.kind & kSpace; s = look(q)) {
      last = q;
      q = s.next;
      if (s.kind & kNewline) after_newline = q;
    }
    if (after_newline) return after_newline;
    return q == end || last == p ? q : last;
  }

  const char* next_gpt2(const char* p) const {
    const Seen first = look(p);
    const Seen s = *p == ' ' ? look(first.next) : first;
    if (s.kind & kLetter) return letters(s.next);
    if (*p == '\'')
      if (const char* q = contraction(p, false)) return q;
    if (s.kind & kNumber) return numbers(s.next);
    if (s.kind & kSpace) return spaces(p);
    if (s.next == first.next && *p == ' ') return p + 1;  // a space ends the text
    return others(s.next);
  }

  // cl100k and llama3 (3 digits), qwen2 (1 digit)
  const char* next_cl100k(const char* p, int digits) const {
    const Seen first = look(p);
    if (first.kind & kLetter) return letters(first.next);
    if (*p == '\'')
      if (const char* q = contraction(p, true)) return q;
    if (first.kind & kNumber) return numbers_up_to(p, digits);
    if (!(first.kind & kNewline)) {
      const Seen second = look(first.next);
      if (second.kind & kLetter) return letters(second.next);
    }
    if (const char* q = punctuation(p, first, '\n')) return q;
    return spaces_to_newline(p);
  }

  // " ?[^\s\p{L}\p{N}]+[\r\n]*", or null
  const char* punctuation(const char* p, const Seen& first, char also) const {
    const char* body = *p == ' ' ? first.next : p;
    const char* q = others(body);
    return q == body ? nullptr : newlines(q, also);
  }

  // o200k, and tekken, which has no contractions and words of one digit.
  const char* next_o200k(const char* p, bool contractions, int digits) const {
    const Seen first = look(p);
    // [^\r\n\p{L}\p{N}]? is greedy: the match is tried with this character, then without; a mark may be matched by this
    // class or as a letter.
    const bool may_prefix = !(first.kind & (kNewline | kLetter | kNumber));
    const bool may_start = (first.kind & (kUpper | kLower)) != 0;
    const char* q = nullptr;
    if (may_prefix) q = cased_word(first.next);
    if (!q && may_start) q = cased_word(p);
    if (!q && may_prefix) q = upper_word(first.next);
    if (!q && may_start) q = upper_word(p);
    if (q) {
      const char* more = contractions ? contraction(q, true) : nullptr;
      return more ? more : q;
    }
    if (first.kind & kNumber) return numbers_up_to(p, digits);
    if ((q = punctuation(p, first, '/'))) return q;
    return spaces_to_newline(p);
  }
  // U*L+ where U and L share the caseless letters and marks: the longest U* that leaves a character for L+.
  const char* cased_word(const char* p) const {
    const char* after_shared = nullptr;
    const char* q = p;
    for (Seen s = look(q); s.kind & kUpper; s = look(q)) {
      q = s.next;
      if (s.kind & kLower) after_shared = q;
    }
    if (look(q).kind & kLower) return run(q, [](uint8_t k) { return (k & kLower) != 0; });
    return after_shared;
  }
  // U+L* where cased_word found no L
  const char* upper_word(const char* p) const {
    const char* q = run(p, [](uint8_t k) { return (k & kUpper) != 0; });
    return q == p ? nullptr : q;
  }
};

// Calls word(begin, end) for each word of `text`.
template <class Word> void cut_words(WordPattern pattern, std::string_view text, Word&& word) {
  WordCutter cutter;
  cutter.end = text.data() + text.size();
  const auto all = [&](auto next) {
    for (const char* p = text.data(); p != cutter.end;) {
      const char* q = next(p);
      word(p, q);
      p = q;
    }
  };
  switch (pattern) {
    case WordPattern::gpt2: return all([&](const char* p) { return cutter.next_gpt2(p); });
    case WordPattern::cl100k: return all([&](const char* p) { return cutter.next_cl100k(p, 3); });
    case WordPattern::qwen2: return all([&](const char* p) { return cutter.next_cl100k(p, 1); });
    case WordPattern::o200k: return all([&](const char* p) { return cutter.next_o200k(p, true, 3); });
    case WordPattern::tekken: return all([&](const char* p) { return cutter.next_o200k(p, false, 1); });
    case WordPattern::smollm: break;
  }
  // Each digit is a word; the text between two digits is matched separately, so that gpt2's pattern sees its end.
  const char* const text_end = cutter.end;
  for (const char* p = text.data(); p != text_end;) {
    cutter.end = text_end;
    if (cutter.look(p).kind & kNumber) {
      const char* next = cutter.look(p).next;
      word(p, next);
      p = next;
      continue;
    }
    cutter.end = cutter.run(p, [](uint8_t k) { return (k & kNumber) == 0; });
    while (p != cutter.end) {
      const char* next = cutter.next_gpt2(p);
      word(p, next);
      p = next;
    }
  }
}

// A hash of bytes in 64 bits, for tables in memory (it may differ between machines).
inline uint64_t mix(uint64_t a, uint64_t b) {
  const unsigned __int128 product = (unsigned __int128)(a)*b;
  return uint64_t(product) ^ uint64_t(product >> 64);
}
inline uint64_t hash_bytes(const char* p, size_t n) {
  uint64_t h = 0x9e3779b97f4a7c15u ^ n;
  uint64_t word;
  for (; n >= 8; n -= 8, p += 8) {
    __builtin_memcpy(&word, p, 8);
    h = mix(h ^ word, 0xd6e8feb86659fd93u);
  }
  word = 0;
  __builtin_memcpy(&word, p, n);
  return mix(h ^ word ^ 0xa0761d6478bd642fu, 0xe7037ed1a0b428dbu);
}

}  // namespace ingot::detail
