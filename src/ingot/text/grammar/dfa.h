#pragma once
// Finite automata over code points, for the strings and the decimal notation of numbers in a schema. A pattern becomes
// a nondeterministic automaton, is determinized, and is intersected with the automata of the schema's other keywords.
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ingot {

// A set of code points without surrogates: ascending ranges that do not touch, both ends included.
class CodeSet {
 public:
  using Range = std::pair<uint32_t, uint32_t>;
  CodeSet() = default;
  CodeSet(std::vector<Range> ranges);  // in any order, overlapping or not
  const std::vector<Range>& ranges() const { return ranges_; }
  bool empty() const { return ranges_.empty(); }
  bool contains(uint32_t code) const;
  CodeSet inverse() const;
  friend CodeSet operator|(CodeSet a, const CodeSet& b);

 private:
  std::vector<Range> ranges_;
};

struct Dfa {
  struct Edge {
    uint32_t low, high;  // code points, both included
    int32_t to;
  };
  struct State {
    std::vector<Edge> edges;  // ascending, without overlap
    bool accepts = false;
  };
  std::vector<State> states;  // the first is the start; none: no string is accepted

  bool accepts(std::u32string_view text) const;
};

struct Nfa {
  enum class When : uint8_t { always, at_start, at_end };  // of the string
  struct Step {
    int32_t to;
    When when;
  };
  struct Edge {
    CodeSet set;
    int32_t to;
  };
  struct State {
    std::vector<Step> steps;
    std::vector<Edge> edges;
  };
  std::vector<State> states;
  int32_t start = 0, accept = 0;

  int32_t add();
  void step(int32_t from, int32_t to, When when = When::always) { states[size_t(from)].steps.push_back({to, when}); }
  void edge(int32_t from, CodeSet set, int32_t to) { states[size_t(from)].edges.push_back({std::move(set), to}); }
};

// The work that the automata of one schema may cost. Throws Error{usage} when the budget is spent, or when an automaton
// is too large.
struct AutomatonBudget {
  size_t steps = 5'000'000;
  void spend(size_t n = 1);
};

// `search`: a match anywhere in the string is enough, as for a schema's pattern; otherwise the whole string must match.
// The result has no dead states: from every state some string is accepted.
Dfa determinize(const Nfa& nfa, bool search, AutomatonBudget& budget);
Dfa intersect(const Dfa& a, const Dfa& b, AutomatonBudget& budget);
// Strings with `low` to `high` characters; high < 0 means no upper limit.
Dfa strings_of_length(int64_t low, int64_t high);
// Every string except the names.
Dfa strings_except(const std::vector<std::u32string>& names);

}  // namespace ingot
