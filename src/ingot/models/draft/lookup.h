#pragma once
// Drafts by lookup: the longest suffix of the slot's tokens that occurred earlier, and the tokens that followed its
// latest earlier place. Text that the caller predicts is a second source.
#include <memory>

#include "ingot/models/draft/drafter.h"
#include "ingot/models/draft/suffix_automaton.h"

namespace ingot::draft {

struct LookupOptions {
  int64_t least_match = 3;  // tokens; shorter matches are chance
  int64_t most = 15;        // tokens of a draft
  double worth = 1;         // tokens of a draft per token of the match
  int64_t long_match = 8;   // from this length on the match is a Source::long_lookup
};

// A predicted text, followed along the slot's tokens. The place in the prediction advances with each token until a
// token differs. The place is then found again by the longest suffix of the slot's tokens, of at least `least_match`
// tokens, that the prediction contains.
class Prediction {
 public:
  Prediction(std::vector<int32_t> ids, int64_t least_match);
  void append(int32_t id);
  void restart();                           // before the slot's first token
  int64_t match() const { return match_; }  // tokens matched up to the present place; 0: the place is lost
  std::span<const int32_t> rest() const;    // the predicted tokens after the place

 private:
  std::vector<int32_t> ids_;
  int64_t least_match_;
  SuffixAutomaton automaton_;
  SuffixAutomaton::Cursor cursor_;
  int64_t place_ = 0, match_ = 0;
};

class LookupDrafter final : public Drafter {
 public:
  // `prediction`: tokens that the answer may contain; may be empty.
  explicit LookupDrafter(std::vector<int32_t> prediction = {}, const LookupOptions& options = {});
  void append(std::span<const int32_t> ids) override;
  void truncate(int64_t length) override;  // takes the time of appending the remaining tokens
  int64_t length() const override { return int64_t(ids_.size()); }
  // The prediction's tokens if its match is at least as long as the match among the slot's tokens. A copy may run into
  // the draft itself, as in LZ77, so that a period continues.
  Draft draft(int64_t most) const override;

 private:
  LookupOptions options_;
  Prediction prediction_;
  std::vector<int32_t> ids_;
  SuffixAutomaton automaton_;
};

}  // namespace ingot::draft
