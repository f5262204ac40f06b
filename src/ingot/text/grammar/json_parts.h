#pragma once
// The parts of every JSON text as rules of a grammar: strings, numbers, white space, any value.
#include <map>
#include <vector>

#include "ingot/text/grammar/dfa.h"
#include "ingot/text/grammar/grammar.h"

namespace ingot {

class JsonParts {
 public:
  using Node = Grammar::Node;
  using Rule = Grammar::Rule;
  explicit JsonParts(Grammar& grammar);

  // character: one character of a string, as UTF-8 (RFC 3629) or escaped; half a surrogate pair is not a character.
  // space: nothing, one blank, or a line break with at most 32 blanks.
  Rule character, text, integer, number, space, any = -1, any_object = -1;

  Node mark(char c, Node next) const { return g_.one_of(Grammar::bytes({&c, 1}), next); }
  // Objects and arrays of any length.
  Node object(Rule key, Rule value, Node next) const;
  Node array(Rule value, Node next) const;
  // A string in quotes whose characters the automaton accepts. Quotes, backslashes and control characters are escaped;
  // all other characters are UTF-8.
  Node string_of(const Dfa& dfa, Node next);
  // A number whose characters the automaton accepts.
  Node number_of(const Dfa& dfa, Node next);

 private:
  static constexpr int kDigits = 15;  // a double represents every decimal of this many digits
  Node up_to(int n, Node next) const;
  void add_any(int depth);
  Node states_of(const Dfa& dfa, Node end, bool in_string);
  void add_characters(Node to, const CodeSet& set, Node next);
  Rule beyond_ascii(const CodeSet& set);
  Grammar& g_;
  std::vector<Rule> anys_;  // indexed by the remaining depth of nesting
  std::map<std::vector<CodeSet::Range>, Rule> beyond_ascii_;
};

}  // namespace ingot
