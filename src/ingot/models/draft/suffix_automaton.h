#pragma once
// A suffix automaton: all substrings of a text of token ids, in memory proportional to the text. Each appended token
// takes constant time on average. After each token the automaton knows the longest suffix of the text that occurred
// before, and the latest earlier place of this suffix.
//
// A state is a class of substrings that end at the same places. A state's link leads to the longest suffix that ends at
// more places, so the link of the whole text's state is the longest suffix with an earlier occurrence.
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ingot::draft {

class SuffixAutomaton {
 public:
  SuffixAutomaton() { clear(); }
  void clear();
  void append(int32_t id);
  int64_t size() const { return size_; }  // tokens of the text
  // The last `length` tokens of the text also stand before position `end`, where end < size(). Length 0: the last token
  // is new.
  struct Match {
    int64_t length = 0, end = 0;
  };
  Match match() const { return match_; }

  // The longest suffix of a second text that occurs in this text. The cursor follows the second text token by token;
  // this text must not grow meanwhile.
  struct Cursor {
    int32_t state = 0;
    int64_t length = 0;
  };
  Cursor advance(Cursor cursor, int32_t id) const;
  int64_t end(Cursor cursor) const { return states_[size_t(cursor.state)].latest; }  // of the latest occurrence

 private:
  struct State {
    int32_t length = 0, link = -1;  // the longest substring of the class; -1: the state of the empty substring
    int32_t latest = 0;             // the latest end of an occurrence
    int32_t edges = -1;             // a list
  };
  struct Edge {
    int32_t state, id, target, next;  // next: in the list of the state's edges
  };
  int32_t find(int32_t state, int32_t id) const;  // the edge, or -1
  void add_edge(int32_t state, int32_t id, int32_t target);
  int32_t clone(int32_t state, int32_t length);
  size_t place_of(int32_t state, int32_t id) const;
  void grow_table();

  std::vector<State> states_;
  std::vector<Edge> edges_;
  std::vector<int32_t> table_;  // edges by hash of (state, id), open addressing; -1: free
  int64_t size_ = 0;
  int32_t whole_ = 0;  // the state of the whole text
  Match match_;
};

}  // namespace ingot::draft
