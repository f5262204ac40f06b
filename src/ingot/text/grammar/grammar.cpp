#include "ingot/text/grammar/grammar.h"

#include <algorithm>

#include "ingot/core/check.h"

namespace ingot {

Grammar::Set Grammar::bytes(std::string_view members) {
  Set set;
  for (const char c : members) set.set(uint8_t(c));
  return set;
}
Grammar::Set Grammar::range(int low, int high) {
  Set set;
  for (int i = low; i <= high; ++i) set.set(size_t(i));
  return set;
}

Grammar::Node Grammar::one_of(const Set& set, Node next) {
  nodes_.push_back({.kind = Kind::one_of, .next = next, .of = int32_t(sets_.size())});
  sets_.push_back(set);
  return Node(nodes_.size()) - 1;
}
Grammar::Node Grammar::text(std::string_view text, Node next) {
  for (size_t i = text.size(); i-- > 0;) next = one_of(bytes(text.substr(i, 1)), next);
  return next;
}
Grammar::Node Grammar::control(int which, Node next) {
  return one_of(range(kFirstControl + which, kFirstControl + which), next);
}
Grammar::Node Grammar::either(std::vector<Node> options) {
  nodes_.push_back({.kind = Kind::either, .of = int32_t(options_.size())});
  options_.push_back(std::move(options));
  return Node(nodes_.size()) - 1;
}
Grammar::Node Grammar::any_text(Node next) {
  const Node more = either({next});
  add(more, one_of(range(0, 255), more));
  return more;
}
void Grammar::add(Node either, Node option) { options_[size_t(nodes_[size_t(either)].of)].push_back(option); }
Grammar::Node Grammar::call(Rule rule, Node next) {
  nodes_.push_back({.kind = Kind::call, .next = next, .of = rule});
  return Node(nodes_.size()) - 1;
}
Grammar::Rule Grammar::declare() {
  starts_.push_back(either({}));
  return Rule(starts_.size()) - 1;
}
Grammar::Rule Grammar::rule(Node start) {
  starts_.push_back(start);
  return Rule(starts_.size()) - 1;
}

// The least fixed point: nodes that lead to an end are added until none remains.
std::vector<bool> Grammar::ends() const {
  std::vector<bool> reaches(nodes_.size());
  for (bool grew = true; grew;) {
    grew = false;
    for (size_t i = 0; i < nodes_.size(); ++i) {
      if (reaches[i]) continue;
      const Entry& e = nodes_[i];
      bool now = e.kind == Kind::end;
      if (e.kind == Kind::one_of) now = reaches[size_t(e.next)];
      if (e.kind == Kind::call) now = reaches[size_t(e.next)] && reaches[size_t(starts_[size_t(e.of)])];
      if (e.kind == Kind::either)
        for (const Node option : options_[size_t(e.of)]) now = now || reaches[size_t(option)];
      if (now) reaches[i] = grew = true;
    }
  }
  std::vector<bool> rules;
  for (const Node start : starts_) rules.push_back(reaches[size_t(start)]);
  return rules;
}

GrammarWalk::GrammarWalk(Grammar grammar, Grammar::Rule start) : grammar_(std::move(grammar)) {
  intern({{grammar_.starts_[size_t(start)], -1}});
}

int32_t GrammarWalk::pushed(Grammar::Node back_to, int32_t calls) {
  const auto [at, added] = call_of_.emplace(Place{back_to, calls}, int32_t(calls_.size()));
  if (added) calls_.push_back({back_to, calls});
  return at->second;
}

// Adds the places that `at` leads to without reading a symbol and at which a symbol can be read.
void GrammarWalk::settle(Place at, std::vector<Place>& seen, std::vector<Place>& places, bool& complete) {
  constexpr size_t kMostPlaces = 4096;
  std::vector<Place> open = {at};
  while (!open.empty()) {
    const Place p = open.back();
    open.pop_back();
    const auto [node, calls] = p;
    const Grammar::Entry& e = grammar_.nodes_[size_t(node)];
    if (e.kind == Grammar::Kind::one_of) {
      places.push_back(p);
      continue;
    }
    const auto where = std::lower_bound(seen.begin(), seen.end(), p);
    if (where != seen.end() && *where == p) continue;
    seen.insert(where, p);
    if (seen.size() > kMostPlaces) fail(ErrorCode::usage, "the schema can be read in too many ways at once");
    if (e.kind == Grammar::Kind::either) {
      for (const Grammar::Node option : grammar_.options_[size_t(e.of)]) open.push_back({option, calls});
    } else if (e.kind == Grammar::Kind::call) {
      // A call at the end of a rule needs no return, so that lists written by recursion do not grow the stack.
      const bool last = grammar_.nodes_[size_t(e.next)].kind == Grammar::Kind::end;
      open.push_back({grammar_.starts_[size_t(e.of)], last ? calls : pushed(e.next, calls)});
    } else if (calls < 0) {
      complete = true;
    } else {
      open.push_back(calls_[size_t(calls)]);
    }
  }
}

int32_t GrammarWalk::intern(std::vector<Place> from) {
  constexpr size_t kMostStates = 16384, kMostCalls = 1 << 20;
  std::vector<Place> seen, places;
  bool complete = false;
  for (const Place& p : from) settle(p, seen, places, complete);
  std::sort(places.begin(), places.end());
  places.erase(std::unique(places.begin(), places.end()), places.end());
  if (places.empty() && !complete) return kDead;
  const auto [at, added] = known_.emplace(std::pair(places, complete), int32_t(states_.size()));
  if (added) {
    if (states_.size() >= kMostStates || calls_.size() >= kMostCalls)
      fail(ErrorCode::usage, "the schema needs more than ", kMostStates, " states");
    states_.push_back({std::move(places), complete, std::vector<int32_t>(Grammar::kSymbols, kUnknown)});
  }
  return at->second;
}

int32_t GrammarWalk::find(int32_t state, int symbol) {
  std::vector<Place> after;
  for (const auto& [node, calls] : states_[size_t(state)].places) {
    const Grammar::Entry& e = grammar_.nodes_[size_t(node)];
    if (grammar_.sets_[size_t(e.of)].test(size_t(symbol))) after.push_back({e.next, calls});
  }
  const int32_t found = after.empty() ? kDead : intern(std::move(after));
  states_[size_t(state)].next[size_t(symbol)] = found;
  return found;
}

}  // namespace ingot
