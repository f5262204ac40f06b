#include "ingot/text/grammar/dfa.h"

#include <algorithm>
#include <map>

#include "ingot/core/check.h"

namespace ingot {
namespace {

constexpr uint32_t kLastCode = 0x10FFFF, kFirstSurrogate = 0xD800, kLastSurrogate = 0xDFFF;
constexpr size_t kMostStates = 20000;

[[noreturn]] void too_large() { fail(ErrorCode::usage, "it needs too large an automaton"); }

const CodeSet& every_code() {
  static const CodeSet all = CodeSet().inverse();
  return all;
}

// Removes the states from which no string is accepted, and the edges to them.
Dfa pruned(const Dfa& d) {
  std::vector<std::vector<int32_t>> before(d.states.size());
  std::vector<int32_t> open;
  std::vector<bool> lives(d.states.size());
  for (size_t s = 0; s < d.states.size(); ++s) {
    for (const Dfa::Edge& e : d.states[s].edges) before[size_t(e.to)].push_back(int32_t(s));
    if (d.states[s].accepts) lives[s] = true, open.push_back(int32_t(s));
  }
  while (!open.empty()) {
    const int32_t s = open.back();
    open.pop_back();
    for (const int32_t b : before[size_t(s)])
      if (!lives[size_t(b)]) lives[size_t(b)] = true, open.push_back(b);
  }
  Dfa out;
  if (d.states.empty() || !lives[0]) return out;
  std::vector<int32_t> number(d.states.size(), -1);
  int32_t count = 0;
  for (size_t s = 0; s < d.states.size(); ++s)
    if (lives[s]) number[s] = count++;
  for (size_t s = 0; s < d.states.size(); ++s) {
    if (!lives[s]) continue;
    Dfa::State state{.accepts = d.states[s].accepts};
    for (const Dfa::Edge& e : d.states[s].edges)
      if (lives[size_t(e.to)]) state.edges.push_back({e.low, e.high, number[size_t(e.to)]});
    out.states.push_back(std::move(state));
  }
  return out;
}

// The subset construction: a state of the result is a set of states of the automaton.
class Determinizer {
 public:
  Determinizer(const Nfa& nfa, bool search, AutomatonBudget& budget)
      : nfa_(nfa), search_(search), budget_(budget), mark_(nfa.states.size(), 0) {}

  Dfa run() {
    find(closure({nfa_.start}, true, false), true);
    for (size_t s = 0; s < sets_.size(); ++s) {
      const std::vector<int32_t> set = sets_[s];
      add_edges(s, set);
    }
    return pruned(out_);
  }

 private:
  // The states that are reachable without reading a character.
  std::vector<int32_t> closure(std::vector<int32_t> open, bool at_start, bool at_end) {
    ++round_;
    std::vector<int32_t> set;
    while (!open.empty()) {
      const int32_t s = open.back();
      open.pop_back();
      if (mark_[size_t(s)] == round_) continue;
      mark_[size_t(s)] = round_;
      budget_.spend();
      set.push_back(s);
      for (const Nfa::Step& step : nfa_.states[size_t(s)].steps)
        if (step.when == Nfa::When::always || (step.when == Nfa::When::at_start && at_start) ||
            (step.when == Nfa::When::at_end && at_end))
          open.push_back(step.to);
    }
    std::sort(set.begin(), set.end());
    return set;
  }
  bool has_accept(const std::vector<int32_t>& set) const {
    return std::binary_search(set.begin(), set.end(), nfa_.accept);
  }
  int32_t find(std::vector<int32_t> set, bool at_start) {
    const bool matched = search_ && has_accept(set);  // the rest of the string no longer matters
    if (matched) set = {nfa_.accept}, at_start = false;
    const auto [at, added] = number_.emplace(std::pair(set, at_start), int32_t(sets_.size()));
    if (!added) return at->second;
    if (sets_.size() >= kMostStates) too_large();
    out_.states.push_back({.accepts = has_accept(closure(set, at_start, true))});
    if (matched)
      for (const auto& [low, high] : every_code().ranges()) out_.states.back().edges.push_back({low, high, at->second});
    sets_.push_back(matched ? std::vector<int32_t>() : std::move(set));
    return at->second;
  }
  void add_edges(size_t from, const std::vector<int32_t>& set) {
    if (set.empty()) return;  // find() has already added the edges
    std::vector<uint32_t> cuts;
    const auto cut = [&](const CodeSet& codes) {
      for (const auto& [low, high] : codes.ranges()) cuts.push_back(low), cuts.push_back(high + 1);
    };
    for (const int32_t s : set)
      for (const Nfa::Edge& e : nfa_.states[size_t(s)].edges) cut(e.set);
    if (search_) cut(every_code());
    std::sort(cuts.begin(), cuts.end());
    cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
    for (size_t i = 0; i + 1 < cuts.size(); ++i) {
      std::vector<int32_t> after;
      for (const int32_t s : set)
        for (const Nfa::Edge& e : nfa_.states[size_t(s)].edges) {
          budget_.spend();
          if (e.set.contains(cuts[i])) after.push_back(e.to);
        }
      if (search_ && every_code().contains(cuts[i])) after.push_back(nfa_.start);
      if (after.empty()) continue;
      const int32_t to = find(closure(std::move(after), false, false), false);
      std::vector<Dfa::Edge>& edges = out_.states[from].edges;
      if (!edges.empty() && edges.back().to == to && edges.back().high + 1 == cuts[i])
        edges.back().high = cuts[i + 1] - 1;
      else
        edges.push_back({cuts[i], cuts[i + 1] - 1, to});
    }
  }

  const Nfa& nfa_;
  const bool search_;
  AutomatonBudget& budget_;
  std::vector<size_t> mark_;
  size_t round_ = 0;
  std::vector<std::vector<int32_t>> sets_;
  std::map<std::pair<std::vector<int32_t>, bool>, int32_t> number_;
  Dfa out_;
};

}  // namespace

CodeSet::CodeSet(std::vector<Range> ranges) {
  std::sort(ranges.begin(), ranges.end());
  const auto add = [&](uint32_t low, uint32_t high) {
    if (low > high) return;
    if (!ranges_.empty() && low <= ranges_.back().second + 1)
      ranges_.back().second = std::max(ranges_.back().second, high);
    else
      ranges_.push_back({low, high});
  };
  for (const auto& [low, high] : ranges) {
    if (low < kFirstSurrogate) add(low, std::min(high, kFirstSurrogate - 1));
    if (high > kLastSurrogate) add(std::max(low, kLastSurrogate + 1), std::min(high, kLastCode));
  }
}
bool CodeSet::contains(uint32_t code) const {
  const auto at = std::upper_bound(ranges_.begin(), ranges_.end(), Range{code, UINT32_MAX});
  return at != ranges_.begin() && code <= std::prev(at)->second;
}
CodeSet CodeSet::inverse() const {
  std::vector<Range> rest;
  uint32_t from = 0;
  for (const auto& [low, high] : ranges_) {
    if (low > from) rest.push_back({from, low - 1});
    from = high + 1;
  }
  if (from <= kLastCode) rest.push_back({from, kLastCode});
  return CodeSet(std::move(rest));
}
CodeSet operator|(CodeSet a, const CodeSet& b) {
  a.ranges_.insert(a.ranges_.end(), b.ranges_.begin(), b.ranges_.end());
  return CodeSet(std::move(a.ranges_));
}

bool Dfa::accepts(std::u32string_view text) const {
  if (states.empty()) return false;
  int32_t at = 0;
  for (const char32_t c : text) {
    const auto& edges = states[size_t(at)].edges;
    const auto e = std::find_if(edges.begin(), edges.end(), [&](const Edge& x) { return x.low <= c && c <= x.high; });
    if (e == edges.end()) return false;
    at = e->to;
  }
  return states[size_t(at)].accepts;
}

int32_t Nfa::add() {
  if (states.size() >= kMostStates) too_large();
  states.emplace_back();
  return int32_t(states.size()) - 1;
}

void AutomatonBudget::spend(size_t n) {
  if (n > steps) too_large();
  steps -= n;
}

Dfa determinize(const Nfa& nfa, bool search, AutomatonBudget& budget) {
  return Determinizer(nfa, search, budget).run();
}

Dfa intersect(const Dfa& a, const Dfa& b, AutomatonBudget& budget) {
  Dfa out;
  if (a.states.empty() || b.states.empty()) return out;
  std::map<std::pair<int32_t, int32_t>, int32_t> number;
  std::vector<std::pair<int32_t, int32_t>> pairs;
  const auto find = [&](int32_t x, int32_t y) {
    const auto [at, added] = number.emplace(std::pair(x, y), int32_t(pairs.size()));
    if (added) {
      if (pairs.size() >= kMostStates) too_large();
      pairs.push_back({x, y});
      out.states.push_back({.accepts = a.states[size_t(x)].accepts && b.states[size_t(y)].accepts});
    }
    return at->second;
  };
  find(0, 0);
  for (size_t s = 0; s < pairs.size(); ++s) {
    budget.spend(a.states[size_t(pairs[s].first)].edges.size() + b.states[size_t(pairs[s].second)].edges.size());
    const auto& left = a.states[size_t(pairs[s].first)].edges;
    const auto& right = b.states[size_t(pairs[s].second)].edges;
    for (size_t i = 0, j = 0; i < left.size() && j < right.size();) {
      const uint32_t low = std::max(left[i].low, right[j].low), high = std::min(left[i].high, right[j].high);
      if (low <= high) {
        const int32_t to = find(left[i].to, right[j].to);
        out.states[s].edges.push_back({low, high, to});
      }
      left[i].high < right[j].high ? ++i : ++j;
    }
  }
  return pruned(out);
}

Dfa strings_of_length(int64_t low, int64_t high) {
  Dfa d;
  const int64_t last = high < 0 ? low : high;
  if (last >= int64_t(kMostStates)) too_large();
  for (int64_t n = 0; n <= last; ++n) {
    Dfa::State state{.accepts = n >= low};
    if (n < last || high < 0)
      for (const auto& [from, to] : every_code().ranges())
        state.edges.push_back({from, to, int32_t(std::min(n + 1, last))});
    d.states.push_back(std::move(state));
  }
  return pruned(d);
}

Dfa strings_except(const std::vector<std::u32string>& names) {
  std::vector<std::map<char32_t, int32_t>> tree(1);
  std::vector<bool> is_name(1);
  for (const std::u32string& name : names) {
    int32_t at = 0;
    for (const char32_t c : name) {
      const auto [next, added] = tree[size_t(at)].emplace(c, int32_t(tree.size()));
      at = next->second;
      if (!added) continue;
      tree.emplace_back();
      is_name.push_back(false);
    }
    is_name[size_t(at)] = true;
  }
  const auto other = int32_t(tree.size());
  Dfa d;
  for (size_t s = 0; s <= tree.size(); ++s) {
    Dfa::State state{.accepts = s == tree.size() || !is_name[s]};
    std::vector<CodeSet::Range> listed;
    if (s < tree.size())
      for (const auto& [c, to] : tree[s]) listed.push_back({c, c}), state.edges.push_back({c, c, to});
    const CodeSet rest = CodeSet(listed).inverse();
    for (const auto& [low, high] : rest.ranges()) state.edges.push_back({low, high, other});
    std::sort(state.edges.begin(), state.edges.end(),
              [](const Dfa::Edge& a, const Dfa::Edge& b) { return a.low < b.low; });
    d.states.push_back(std::move(state));
  }
  return d;
}

}  // namespace ingot
