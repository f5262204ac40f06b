#include "ingot/text/grammar/json_parts.h"

#include <algorithm>

#include "ingot/text/grammar/json_schema.h"

namespace ingot {
namespace {

using Node = Grammar::Node;
using Rule = Grammar::Rule;
using Set = Grammar::Set;
constexpr Node kEnd = Grammar::kEnd;

Rule character_rule(Grammar& g) {
  const Set tail = Grammar::range(0x80, 0xBF);
  const auto tails = [&](int n) {
    Node next = kEnd;
    for (int i = 0; i < n; ++i) next = g.one_of(tail, next);
    return next;
  };
  const auto lead = [&](int low, int high, int second_low, int second_high, int more) {
    return g.one_of(Grammar::range(low, high), g.one_of(Grammar::range(second_low, second_high), tails(more)));
  };
  const Set digits = Grammar::range('0', '9');
  const Set hex = digits | Grammar::range('a', 'f') | Grammar::range('A', 'F'), d = Grammar::bytes("dD");
  const auto four = [&](const Set& first, const Set& second, Node next) {
    return g.one_of(first, g.one_of(second, g.one_of(hex, g.one_of(hex, next))));
  };
  const Set low_half = Grammar::range('c', 'f') | Grammar::range('C', 'F');
  const Set high_half = Grammar::bytes("89abAB");
  const Node unicode = g.either({four(hex & ~d, hex, kEnd), four(d, Grammar::range('0', '7'), kEnd),
                                 four(d, high_half, g.text("\\u", four(d, low_half, kEnd)))});
  const Node escaped = g.either({g.one_of(Grammar::bytes("\"\\/bfnrt"), kEnd), g.one_of(Grammar::bytes("u"), unicode)});
  return g.rule(g.either(
      {g.one_of(Grammar::range(0x20, 0x7F) & ~Grammar::bytes("\"\\"), kEnd), g.one_of(Grammar::bytes("\\"), escaped),
       g.one_of(Grammar::range(0xC2, 0xDF), tails(1)), lead(0xE0, 0xE0, 0xA0, 0xBF, 1), lead(0xE1, 0xEC, 0x80, 0xBF, 1),
       lead(0xED, 0xED, 0x80, 0x9F, 1), lead(0xEE, 0xEF, 0x80, 0xBF, 1), lead(0xF0, 0xF0, 0x90, 0xBF, 2),
       lead(0xF1, 0xF3, 0x80, 0xBF, 2), lead(0xF4, 0xF4, 0x80, 0x8F, 2)}));
}

// The escape of one character after its backslash: a short escape, or \u00XX.
struct Escape {
  char name;
  uint32_t code;
};
constexpr Escape kEscapes[] = {{'"', '"'},  {'\\', '\\'}, {'/', '/'},  {'b', '\b'},
                               {'f', '\f'}, {'n', '\n'},  {'r', '\r'}, {'t', '\t'}};

}  // namespace

JsonParts::JsonParts(Grammar& g) : character(character_rule(g)), g_(g) {
  const Node more = g.either({});
  g.add(more, g.one_of(Grammar::bytes("\""), kEnd));
  g.add(more, g.call(character, more));
  text = g.rule(g.one_of(Grammar::bytes("\""), more));
  const auto whole = [&](Node next) {
    const Node rest = g.one_of(Grammar::range('1', '9'), up_to(kDigits - 1, next));
    const Node digits = g.either({g.one_of(Grammar::bytes("0"), next), rest});
    return g.either({digits, g.one_of(Grammar::bytes("-"), digits)});
  };
  integer = g.rule(whole(kEnd));
  const Node power = g.one_of(Grammar::range('1', '9'), up_to(1, kEnd));
  const Node exponent = g.one_of(Grammar::bytes("eE"), g.either({power, g.one_of(Grammar::bytes("+-"), power)}));
  const Node tail = g.either({kEnd, exponent});
  const Node fraction = g.one_of(Grammar::bytes("."), g.one_of(Grammar::range('0', '9'), up_to(kDigits - 1, tail)));
  number = g.rule(whole(g.either({tail, fraction})));
  constexpr int kIndent = 32;
  Node indent = kEnd;
  for (int i = 0; i < kIndent; ++i) indent = g.either({kEnd, g.one_of(Grammar::bytes(" "), indent)});
  space = g.rule(g.either({kEnd, g.one_of(Grammar::bytes(" "), kEnd), g.one_of(Grammar::bytes("\n"), indent)}));
  for (int depth = 0; depth <= kJsonNesting; ++depth) add_any(depth);
  any = anys_.back();
  any_object = g.rule(object(text, anys_[size_t(kJsonNesting - 1)], kEnd));
}

// Accepts up to n further digits.
Node JsonParts::up_to(int n, Node next) const {
  const Set digit = Grammar::range('0', '9');
  Node after = next;
  for (int i = 0; i < n; ++i) after = g_.either({next, g_.one_of(digit, after)});
  return after;
}
Node JsonParts::object(Rule key, Rule value, Node next) const {
  const Node close = g_.call(space, mark('}', next)), more = g_.either({});
  const Node pair = g_.call(key, mark(':', g_.call(space, g_.call(value, more))));
  const Node first = g_.call(space, pair);
  g_.add(more, close);
  g_.add(more, mark(',', first));
  return mark('{', g_.either({close, first}));
}
Node JsonParts::array(Rule value, Node next) const {
  const Node close = g_.call(space, mark(']', next)), more = g_.either({});
  const Node first = g_.call(space, g_.call(value, more));
  g_.add(more, close);
  g_.add(more, mark(',', first));
  return mark('[', g_.either({close, first}));
}
void JsonParts::add_any(int depth) {
  std::vector<Node> kinds = {g_.call(text, kEnd), g_.call(number, kEnd), g_.text("true", kEnd), g_.text("false", kEnd),
                             g_.text("null", kEnd)};
  if (depth > 0) {
    kinds.push_back(object(text, anys_.back(), kEnd));
    kinds.push_back(array(anys_.back(), kEnd));
  }
  anys_.push_back(g_.rule(g_.either(std::move(kinds))));
}

Node JsonParts::string_of(const Dfa& dfa, Node next) { return mark('"', states_of(dfa, mark('"', next), true)); }
Node JsonParts::number_of(const Dfa& dfa, Node next) { return states_of(dfa, next, false); }

Node JsonParts::states_of(const Dfa& dfa, Node end, bool in_string) {
  std::vector<Node> nodes;
  for (size_t s = 0; s < std::max<size_t>(dfa.states.size(), 1); ++s) nodes.push_back(g_.either({}));
  for (size_t s = 0; s < dfa.states.size(); ++s) {
    if (dfa.states[s].accepts) g_.add(nodes[s], end);
    std::map<int32_t, std::vector<CodeSet::Range>> by_target;
    for (const Dfa::Edge& e : dfa.states[s].edges) by_target[e.to].push_back({e.low, e.high});
    for (auto& [to, ranges] : by_target) {
      const Node next = nodes[size_t(to)];
      if (in_string) {
        add_characters(nodes[s], CodeSet(std::move(ranges)), next);
      } else {
        Set set;
        for (const auto& [low, high] : ranges) set |= Grammar::range(int(low), int(high));
        g_.add(nodes[s], g_.one_of(set, next));
      }
    }
  }
  return nodes[0];
}

// Accepts the characters of `set` in their form in a JSON string.
void JsonParts::add_characters(Node to, const CodeSet& set, Node next) {
  Set bytes, names;
  for (uint32_t c = 0x20; c < 0x80; ++c)
    if (c != '"' && c != '\\' && set.contains(c)) bytes.set(c);
  if (bytes.any()) g_.add(to, g_.one_of(bytes, next));
  std::vector<Node> escapes;
  for (const Escape& e : kEscapes)
    if (set.contains(e.code)) names.set(uint8_t(e.name));
  if (names.any()) escapes.push_back(g_.one_of(names, next));
  for (uint32_t high = 0; high < 2; ++high) {
    Set digits;
    for (uint32_t low = 0; low < 16; ++low)
      if (set.contains(high * 16 + low))
        digits |= low < 10 ? Grammar::range(int('0' + low), int('0' + low))
                           : Grammar::range(int('a' + low - 10), int('a' + low - 10)) |
                                 Grammar::range(int('A' + low - 10), int('A' + low - 10));
    if (digits.any()) escapes.push_back(g_.text(high == 0 ? "u000" : "u001", g_.one_of(digits, next)));
  }
  if (!escapes.empty()) g_.add(to, g_.one_of(Grammar::bytes("\\"), g_.either(std::move(escapes))));
  if (!set.ranges().empty() && set.ranges().back().second >= 0x80) g_.add(to, g_.call(beyond_ascii(set), next));
}

// The characters in UTF-8. A range is divided where the number of bytes changes, and then so that each part is a
// product of ranges of bytes.
Rule JsonParts::beyond_ascii(const CodeSet& set) {
  std::vector<CodeSet::Range> ranges;
  for (const auto& [low, high] : set.ranges())
    if (high >= 0x80) ranges.push_back({std::max(low, 0x80u), high});
  const auto [known, added] = beyond_ascii_.try_emplace(ranges, -1);
  if (!added) return known->second;
  std::vector<Node> options;
  // Nodes for the last n bytes of the characters low to high; every byte but the first has 6 bits of the character.
  const auto bytes = [&](const auto& self, int n, uint32_t low, uint32_t high, uint32_t lead) -> std::vector<Node> {
    if (n == 1) return {g_.one_of(Grammar::range(int(lead | low), int(lead | high)), kEnd)};
    const uint32_t step = 1u << (6 * (n - 1)), mask = step - 1;
    std::vector<Node> out;
    const auto add = [&](uint32_t from, uint32_t to, uint32_t rest_low, uint32_t rest_high) {
      const Node rest = g_.either(self(self, n - 1, rest_low, rest_high, 0x80));
      out.push_back(g_.one_of(Grammar::range(int(lead | from), int(lead | to)), rest));
    };
    uint32_t first = low / step, last = high / step;
    if (first == last) {
      add(first, last, low & mask, high & mask);
      return out;
    }
    if ((low & mask) != 0) add(first, first, low & mask, mask), ++first;
    if ((high & mask) != mask) add(last, last, 0, high & mask), --last;
    if (first <= last) add(first, last, 0, mask);
    return out;
  };
  for (const auto& [low, high] : ranges)
    for (const auto& [n, from, to, lead] :
         {std::tuple(2, 0x80u, 0x7FFu, 0xC0u), {3, 0x800u, 0xFFFFu, 0xE0u}, {4, 0x10000u, 0x10FFFFu, 0xF0u}}) {
      if (high < from || low > to) continue;
      const std::vector<Node> made = bytes(bytes, n, std::max(low, from), std::min(high, to), lead);
      options.insert(options.end(), made.begin(), made.end());
    }
  return known->second = g_.rule(g_.either(std::move(options)));
}

}  // namespace ingot
