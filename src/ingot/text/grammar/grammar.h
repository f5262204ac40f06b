#pragma once
// A language as rules that call one another, and a walk through it, symbol by symbol. Symbols are the 256 bytes and,
// from kFirstControl on, tokens that no bytes can spell.
//
// A grammar is built backwards: each node is made with the node that follows it. A state of the walk is a set of
// places, each with the calls to which it has to return. The walk makes states when they are first reached and keeps
// them, so that a repeated symbol costs one table lookup.
#include <bitset>
#include <cstdint>
#include <deque>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

namespace ingot {

class Grammar {
 public:
  static constexpr int kFirstControl = 256, kControls = 8, kSymbols = kFirstControl + kControls;
  using Set = std::bitset<kSymbols>;
  using Node = int32_t;
  using Rule = int32_t;

  static constexpr Node kEnd = 0;  // the end of the rule that contains the node
  Grammar() { nodes_.push_back({}); }
  Node one_of(const Set& set, Node next);
  Node text(std::string_view bytes, Node next);
  Node any_text(Node next);  // any bytes, or none
  Node control(int which, Node next);
  // Options may be added to an either-node later; a repetition is an option that leads back to the node.
  Node either(std::vector<Node> options);
  void add(Node either, Node option);
  Node call(Rule rule, Node next);
  Rule declare();
  void define(Rule rule, Node start) { starts_[size_t(rule)] = start; }
  Rule rule(Node start);

  size_t size() const { return nodes_.size(); }
  // For each rule, whether some string leads from its start to its end.
  std::vector<bool> ends() const;

  static Set bytes(std::string_view members);
  static Set range(int low, int high);  // both ends included

 private:
  friend class GrammarWalk;
  enum class Kind : uint8_t { end, one_of, either, call };
  struct Entry {
    Kind kind = Kind::end;
    Node next = kEnd;
    int32_t of = -1;  // index into sets_ or options_, or the number of a rule
  };
  std::vector<Entry> nodes_;
  std::vector<Set> sets_;
  std::vector<std::vector<Node>> options_;
  std::vector<Node> starts_;
};

// A walk through the texts of one rule, in a copy of the grammar. Must be used by one thread at a time.
class GrammarWalk {
 public:
  static constexpr int32_t kDead = -1;
  GrammarWalk(Grammar grammar, Grammar::Rule start);
  int32_t start() const { return 0; }
  // The state after `symbol`, or kDead where the symbol may not follow. Throws Error{usage} where the grammar needs
  // more states, or more simultaneous readings of the text, than a request may cost.
  int32_t next(int32_t state, int symbol) {
    const int32_t known = states_[size_t(state)].next[size_t(symbol)];
    return known != kUnknown ? known : find(state, symbol);
  }
  bool complete(int32_t state) const { return states_[size_t(state)].complete; }  // the text may end here
  int64_t states() const { return int64_t(states_.size()); }

 private:
  static constexpr int32_t kUnknown = -2;
  using Place = std::pair<Grammar::Node, int32_t>;  // a node, and the index of its caller in calls_ or -1
  struct State {
    std::vector<Place> places;
    bool complete = false;
    std::vector<int32_t> next;
  };
  int32_t find(int32_t state, int symbol);
  int32_t intern(std::vector<Place> from);
  void settle(Place at, std::vector<Place>& seen, std::vector<Place>& places, bool& complete);
  int32_t pushed(Grammar::Node back_to, int32_t calls);
  const Grammar grammar_;
  std::deque<State> states_;
  std::map<std::pair<std::vector<Place>, bool>, int32_t> known_;
  std::vector<Place> calls_;  // the node after the call, and the caller of the caller
  std::map<Place, int32_t> call_of_;
};

}  // namespace ingot
