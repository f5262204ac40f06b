#include "ingot/text/grammar/pattern.h"

#include <algorithm>
#include <memory>
#include <string>

#include "ingot/core/check.h"
#include "ingot/text/unicode.h"
#include "ingot/text/utf8.h"

namespace ingot {
namespace {

struct Expression {
  enum class Kind { set, sequence, either, repeat, at_start, at_end };
  Kind kind = Kind::sequence;
  CodeSet set;
  std::vector<std::unique_ptr<Expression>> parts;
  int64_t low = 0, high = -1;  // of repeat; -1: no upper limit
};
using Part = std::unique_ptr<Expression>;

// The sets of \d, \w and \s. Engines differ beyond ASCII: `certain` has the characters that every engine matches,
// `possible` those that at least one engine matches.
struct ClassEscape {
  CodeSet certain, possible;
};
CodeSet unicode_class(int bits, std::vector<CodeSet::Range> more) {
  const uint8_t* classes = detail::char_classes();
  for (uint32_t c = 0; c <= 0x10FFFF; ++c) {
    if ((classes[c] & bits) == 0) continue;
    if (!more.empty() && more.back().second + 1 == c)
      more.back().second = c;
    else
      more.push_back({c, c});
  }
  return CodeSet(std::move(more));
}
const ClassEscape& class_escape(char32_t name) {
  static const ClassEscape digit = {CodeSet({{'0', '9'}}), unicode_class(detail::kNumber, {})};
  static const ClassEscape word = {
      CodeSet({{'0', '9'}, {'A', 'Z'}, {'_', '_'}, {'a', 'z'}}),
      unicode_class(detail::kNumber | detail::kLetter | detail::kMark, {{'_', '_'},
                                                                        {0x200C, 0x200D},
                                                                        {0x203F, 0x2040},
                                                                        {0x2054, 0x2054},
                                                                        {0xFE33, 0xFE34},
                                                                        {0xFE4D, 0xFE4F},
                                                                        {0xFF3F, 0xFF3F}})};
  static const ClassEscape space = {CodeSet({{'\t', '\r'}, {' ', ' '}}),
                                    unicode_class(detail::kSpace, {{0x1C, 0x1F}, {0xFEFF, 0xFEFF}})};
  return name == 'd' ? digit : name == 'w' ? word : space;
}

class Parser {
 public:
  explicit Parser(std::string_view pattern) {
    for (size_t i = 0; i < pattern.size();) {
      const Utf8Char c = utf8_decode(pattern.data() + i);
      text_ += c.code;
      i += size_t(c.length);
    }
  }
  Part parse() {
    Part whole = alternatives(0);
    if (at_ < text_.size()) refuse("a ) without its (");
    return whole;
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const {
    fail(ErrorCode::usage, "character ", at_, ": ", what, " is not supported");
  }
  bool more() const { return at_ < text_.size(); }
  char32_t peek(size_t ahead = 0) const { return at_ + ahead < text_.size() ? text_[at_ + ahead] : 0; }
  bool take(std::u32string_view what) {
    if (text_.compare(at_, what.size(), what) != 0) return false;
    at_ += what.size();
    return true;
  }

  Part alternatives(int depth) {
    if (depth > 100) refuse("a group so deep");
    auto either = std::make_unique<Expression>();
    either->kind = Expression::Kind::either;
    do either->parts.push_back(sequence(depth));
    while (take(U"|"));
    return either->parts.size() == 1 ? std::move(either->parts[0]) : std::move(either);
  }
  Part sequence(int depth) {
    auto all = std::make_unique<Expression>();
    while (more() && peek() != '|' && peek() != ')') all->parts.push_back(repeated(depth));
    return all;
  }
  Part repeated(int depth) {
    Part part = atom(depth);
    for (int64_t low = 0, high = 0; quantifier(low, high);) {
      if (part->kind == Expression::Kind::at_start || part->kind == Expression::Kind::at_end ||
          part->kind == Expression::Kind::repeat)
        refuse("a quantifier here");
      take(U"?");  // a lazy quantifier accepts the same strings
      auto repeat = std::make_unique<Expression>();
      repeat->kind = Expression::Kind::repeat;
      repeat->low = low;
      repeat->high = high;
      repeat->parts.push_back(std::move(part));
      part = std::move(repeat);
    }
    return part;
  }
  // The characters {, } and ] outside of quantifiers and classes are literals.
  bool quantifier(int64_t& low, int64_t& high) {
    if (take(U"*")) return low = 0, high = -1, true;
    if (take(U"+")) return low = 1, high = -1, true;
    if (take(U"?")) return low = 0, high = 1, true;
    if (peek() != '{') return false;
    const size_t before = at_++;
    const bool has_low = number(low);
    high = low;
    if (take(U",") && !number(high)) high = -1;
    if (!has_low || !take(U"}")) return at_ = before, false;
    if (high >= 0 && low > high) refuse("a quantifier whose minimum is above its maximum");
    return true;
  }
  bool number(int64_t& n) {
    constexpr int64_t kMost = 10000;
    const size_t from = at_;
    for (n = 0; peek() >= '0' && peek() <= '9'; ++at_) n = std::min<int64_t>(n * 10 + int64_t(peek() - '0'), kMost);
    if (n >= kMost) refuse("a number of repetitions so large");
    return at_ > from;
  }
  static Part of_kind(Expression::Kind kind) {
    auto e = std::make_unique<Expression>();
    e->kind = kind;
    return e;
  }
  static Part of_set(CodeSet set) {
    Part e = of_kind(Expression::Kind::set);
    e->set = std::move(set);
    return e;
  }
  static CodeSet one(char32_t c) { return CodeSet({{c, c}}); }

  Part atom(int depth) {
    if (take(U"^")) return of_kind(Expression::Kind::at_start);
    if (take(U"$")) return of_kind(Expression::Kind::at_end);
    if (take(U".")) return of_set(CodeSet({{'\n', '\n'}, {'\r', '\r'}, {0x2028, 0x2029}}).inverse());
    if (take(U"[")) return of_set(char_class());
    if (take(U"(")) return group(depth);
    if (peek() == '*' || peek() == '+' || peek() == '?') refuse("a quantifier here");
    if (take(U"\\")) return of_set(escaped());
    return of_set(one(text_[at_++]));
  }
  Part group(int depth) {
    if (peek() == '?') {
      if (take(U"?<") && peek() != '=' && peek() != '!') {
        while (more() && peek() != '>') ++at_;
        if (!take(U">")) refuse("a group's name without its >");
      } else if (!take(U"?:")) {
        refuse("a lookaround or a flag");
      }
    }
    Part inner = alternatives(depth + 1);
    if (!take(U")")) refuse("a ( without its )");
    // The group is an expression of its own: a quantifier behind the parenthesis then repeats the whole group, also
    // where the group's last part has a quantifier.
    auto wrapped = std::make_unique<Expression>();
    wrapped->parts.push_back(std::move(inner));
    return wrapped;
  }

  bool is_class_escape(char32_t c) const {
    return c != 0 && std::u32string_view(U"dDwWsS").find(c) != std::u32string_view::npos;
  }
  // The set of an escape outside of a class. Called after the backslash has been read.
  CodeSet escaped() {
    const char32_t c = peek();
    if (!is_class_escape(c)) return one(character_escape(false));
    ++at_;
    if (c >= 'a') return class_escape(c).certain;
    return class_escape(c - 'A' + 'a').possible.inverse();
  }
  char32_t character_escape(bool in_class) {
    if (!more()) refuse("a \\ at the end");
    const char32_t c = text_[at_++];
    switch (c) {
      case 't': return '\t';
      case 'n': return '\n';
      case 'v': return '\v';
      case 'f': return '\f';
      case 'r': return '\r';
      case 'x': return hex(2);
      case 'u': return unicode_escape();
      case 'b':
        if (in_class) return '\b';
        break;
      case '0':
        if (peek() < '0' || peek() > '9') return 0;
        break;
      default:
        if (c < 0x80 && !(c >= '0' && c <= '9') && !(c >= 'a' && c <= 'z') && !(c >= 'A' && c <= 'Z')) return c;
    }
    --at_;
    refuse("this escape");
  }
  char32_t hex(int digits) {
    char32_t code = 0;
    for (int i = 0; i < digits; ++i) {
      const char32_t c = peek();
      const int value = c >= '0' && c <= '9'                 ? int(c - '0')
                        : (c | 32) >= 'a' && (c | 32) <= 'f' ? int((c | 32) - 'a') + 10
                                                             : -1;
      if (value < 0) refuse("an escape without its digits");
      code = code * 16 + char32_t(value);
      ++at_;
    }
    return code;
  }
  char32_t unicode_escape() {
    char32_t code = 0;
    if (take(U"{")) {
      int digits = 0;
      for (; digits < 6 && peek() != '}'; ++digits) code = code * 16 + hex(1);
      if (digits == 0 || !take(U"}")) refuse("an escape without its digits");
    } else {
      code = hex(4);
      if (code >= 0xD800 && code <= 0xDBFF && take(U"\\u")) {
        const char32_t low = hex(4);
        if (low < 0xDC00 || low > 0xDFFF) refuse("half a surrogate pair");
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
      }
    }
    if ((code >= 0xD800 && code <= 0xDFFF) || code > 0x10FFFF) refuse("half a surrogate pair");
    return code;
  }

  // The set of a class. Called after the [ has been read.
  CodeSet char_class() {
    const bool negated = take(U"^");
    CodeSet certain, possible;
    if (peek() == ']') refuse("an empty class");
    while (!take(U"]")) {
      if (!more()) refuse("a [ without its ]");
      const auto low = class_item(certain, possible);
      const bool range = peek() == '-' && peek(1) != ']' && peek(1) != 0;
      if (range && low < 0) refuse("a range of a class");
      if (low < 0) continue;
      int64_t high = low;
      if (range) {
        ++at_;
        high = class_item(certain, possible);
        if (high < low) refuse("this range");
      }
      const CodeSet these({{uint32_t(low), uint32_t(high)}});
      certain = certain | these;
      possible = possible | these;
    }
    const CodeSet set = negated ? possible.inverse() : certain;
    if (set.empty()) refuse("an empty class");
    return set;
  }
  // The character of a literal, or -1 for an escape such as \d, whose set has been added.
  int64_t class_item(CodeSet& certain, CodeSet& possible) {
    if (!take(U"\\")) return int64_t(text_[at_++]);
    const char32_t c = peek();
    if (!is_class_escape(c)) return int64_t(character_escape(true));
    ++at_;
    const ClassEscape& e = class_escape(c >= 'a' ? c : c - 'A' + 'a');
    certain = certain | (c >= 'a' ? e.certain : e.possible.inverse());
    possible = possible | (c >= 'a' ? e.possible : e.certain.inverse());
    return -1;
  }

  std::u32string text_;
  size_t at_ = 0;
};

// Adds the states of the expression behind `from`, and returns the state in which the expression ends.
int32_t add(Nfa& nfa, const Expression& e, int32_t from, AutomatonBudget& budget) {
  switch (e.kind) {
    case Expression::Kind::set: {
      const int32_t to = nfa.add();
      budget.spend(e.set.ranges().size());  // every repetition has a copy of the set
      nfa.edge(from, e.set, to);
      return to;
    }
    case Expression::Kind::at_start:
    case Expression::Kind::at_end: {
      const int32_t to = nfa.add();
      nfa.step(from, to, e.kind == Expression::Kind::at_start ? Nfa::When::at_start : Nfa::When::at_end);
      return to;
    }
    case Expression::Kind::sequence:
      for (const Part& part : e.parts) from = add(nfa, *part, from, budget);
      return from;
    case Expression::Kind::either: {
      const int32_t to = nfa.add();
      for (const Part& part : e.parts) {
        const int32_t begin = nfa.add();
        nfa.step(from, begin);
        nfa.step(add(nfa, *part, begin, budget), to);
      }
      return to;
    }
    case Expression::Kind::repeat: break;
  }
  for (int64_t i = 0; i < e.low; ++i) from = add(nfa, *e.parts[0], from, budget);
  const int32_t end = nfa.add();
  if (e.high < 0) {
    const int32_t begin = nfa.add();
    nfa.step(from, begin);
    nfa.step(add(nfa, *e.parts[0], begin, budget), begin);
    nfa.step(begin, end);
    return end;
  }
  for (int64_t i = e.low; i < e.high; ++i) {
    nfa.step(from, end);
    from = add(nfa, *e.parts[0], from, budget);
  }
  nfa.step(from, end);
  return end;
}

}  // namespace

Dfa dfa_of_pattern(std::string_view pattern, AutomatonBudget& budget) {
  const Part expression = Parser(pattern).parse();
  Nfa nfa;
  nfa.start = nfa.add();
  nfa.accept = add(nfa, *expression, nfa.start, budget);
  return determinize(nfa, true, budget);
}

}  // namespace ingot
