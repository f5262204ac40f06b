#include "ingot/models/draft/suffix_automaton.h"

#include <algorithm>

#include "ingot/core/check.h"

namespace ingot::draft {
namespace {
// In a periodic text the path of links is as long as the periodic part. Each new occurrence therefore updates only this
// number of states, counted from the state of the whole text. The place of a shorter match may then be older than the
// latest one.
constexpr int kUpdatedStates = 64;
constexpr size_t kSmallTable = 64;
}  // namespace

void SuffixAutomaton::clear() {
  states_.assign(1, {});
  edges_.clear();
  table_.assign(kSmallTable, -1);
  size_ = whole_ = 0;
  match_ = {};
}

// The entry of the edge, or the free entry at which the edge would be inserted.
size_t SuffixAutomaton::place_of(int32_t state, int32_t id) const {
  const uint64_t key = uint64_t(uint32_t(state)) << 32 | uint32_t(id);
  const size_t mask = table_.size() - 1;  // the size is a power of two
  for (size_t at = size_t((key * 0x9e3779b97f4a7c15u) >> 32) & mask;; at = (at + 1) & mask) {
    const int32_t e = table_[at];
    if (e < 0 || (edges_[size_t(e)].state == state && edges_[size_t(e)].id == id)) return at;
  }
}

int32_t SuffixAutomaton::find(int32_t state, int32_t id) const { return table_[place_of(state, id)]; }

void SuffixAutomaton::grow_table() {
  table_.assign(2 * table_.size(), -1);
  for (size_t e = 0; e < edges_.size(); ++e) table_[place_of(edges_[e].state, edges_[e].id)] = int32_t(e);
}

void SuffixAutomaton::add_edge(int32_t state, int32_t id, int32_t target) {
  if (2 * (edges_.size() + 1) > table_.size()) grow_table();
  table_[place_of(state, id)] = int32_t(edges_.size());
  State& s = states_[size_t(state)];
  edges_.push_back({state, id, target, s.edges});
  s.edges = int32_t(edges_.size()) - 1;
}

// A state with the edges, link and places of another.
int32_t SuffixAutomaton::clone(int32_t state, int32_t length) {
  const State original = states_[size_t(state)];
  const int32_t copy = int32_t(states_.size());
  states_.push_back({.length = length, .link = original.link, .latest = original.latest});
  for (int32_t e = original.edges; e >= 0;) {
    const Edge edge = edges_[size_t(e)];
    add_edge(copy, edge.id, edge.target);
    e = edge.next;
  }
  return copy;
}

void SuffixAutomaton::append(int32_t id) {
  INGOT_CHECK(size_ < INT32_MAX / 4, "draft: found a text of ", size_, " tokens, expected fewer than ", INT32_MAX / 4);
  const int32_t end = int32_t(++size_), added = int32_t(states_.size());
  states_.push_back({.length = end, .link = 0, .latest = end});
  int32_t s = whole_, e = -1;
  for (; s >= 0 && (e = find(s, id)) < 0; s = states_[size_t(s)].link) add_edge(s, id, added);
  if (s >= 0) {
    const int32_t next = edges_[size_t(e)].target, length = states_[size_t(s)].length + 1;
    int32_t link = next;
    if (states_[size_t(next)].length != length) {
      // Only the shorter substrings of the class also end here, so the class is divided into two.
      link = clone(next, length);
      states_[size_t(next)].link = link;
      for (; s >= 0 && (e = find(s, id)) >= 0 && edges_[size_t(e)].target == next; s = states_[size_t(s)].link)
        edges_[size_t(e)].target = link;
    }
    states_[size_t(added)].link = link;
  }
  whole_ = added;
  const State& repeated = states_[size_t(states_[size_t(added)].link)];
  match_ = {repeated.length, repeated.latest};
  int32_t on_path = states_[size_t(added)].link;
  for (int i = 0; i < kUpdatedStates && on_path > 0; ++i, on_path = states_[size_t(on_path)].link)
    states_[size_t(on_path)].latest = end;
}

SuffixAutomaton::Cursor SuffixAutomaton::advance(Cursor c, int32_t id) const {
  for (; c.state >= 0; c.state = states_[size_t(c.state)].link) {
    c.length = std::min<int64_t>(c.length, states_[size_t(c.state)].length);
    if (const int32_t e = find(c.state, id); e >= 0) return {edges_[size_t(e)].target, c.length + 1};
  }
  return {};
}

}  // namespace ingot::draft
