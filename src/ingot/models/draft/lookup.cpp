#include "ingot/models/draft/lookup.h"

#include <algorithm>

#include "ingot/core/check.h"

namespace ingot::draft {

const char* name_of(Source source) {
  switch (source) {
    case Source::lookup: return "lookup";
    case Source::long_lookup: return "long lookup";
    case Source::prediction: return "prediction";
    case Source::head: return "head";
  }
  return "?";
}

Prediction::Prediction(std::vector<int32_t> ids, int64_t least_match)
    : ids_(std::move(ids)), least_match_(least_match) {
  for (const int32_t id : ids_) automaton_.append(id);
}

void Prediction::restart() {
  cursor_ = {};
  place_ = match_ = 0;
}

void Prediction::append(int32_t id) {
  if (ids_.empty()) return;
  cursor_ = automaton_.advance(cursor_, id);
  const bool follows = match_ > 0 && place_ < int64_t(ids_.size()) && ids_[size_t(place_)] == id;
  if (follows) {
    ++place_, ++match_;
  } else if (cursor_.length >= least_match_) {
    place_ = automaton_.end(cursor_), match_ = cursor_.length;
  } else {
    match_ = 0;
  }
}

std::span<const int32_t> Prediction::rest() const {
  return match_ > 0 ? std::span(ids_).subspan(size_t(place_)) : std::span<const int32_t>();
}

LookupDrafter::LookupDrafter(std::vector<int32_t> prediction, const LookupOptions& options)
    : options_(options), prediction_(std::move(prediction), options.least_match) {
  INGOT_CHECK(options.least_match >= 1 && options.most >= 1 && options.worth > 0, "draft: found matches from ",
              options.least_match, " tokens, drafts of at most ", options.most, " and ", options.worth,
              " per token of a match, expected more than 0 of each");
}

void LookupDrafter::append(std::span<const int32_t> ids) {
  for (const int32_t id : ids) {
    ids_.push_back(id);
    automaton_.append(id);
    prediction_.append(id);
  }
}

void LookupDrafter::truncate(int64_t length) {
  INGOT_CHECK(length >= 0 && length <= this->length(), "draft: found a length of ", length,
              " to go back to, expected 0 to ", this->length());
  if (length == this->length()) return;
  const std::vector<int32_t> kept(ids_.begin(), ids_.begin() + length);
  ids_.clear();
  automaton_.clear();
  prediction_.restart();
  append(kept);
}

Draft LookupDrafter::draft(int64_t most) const {
  most = std::min(most, options_.most);
  const SuffixAutomaton::Match found = automaton_.match();
  const std::span<const int32_t> predicted = prediction_.rest();
  if (!predicted.empty() && prediction_.match() >= found.length) {
    const auto part = predicted.first(size_t(std::min(std::max<int64_t>(0, most), int64_t(predicted.size()))));
    return {{part.begin(), part.end()}, Source::prediction};
  }
  Draft draft{.source = found.length >= options_.long_match ? Source::long_lookup : Source::lookup};
  if (found.length < options_.least_match) return draft;
  // A short match is worth few tokens.
  const int64_t count = std::min(most, std::max<int64_t>(1, int64_t(double(found.length) * options_.worth)));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = found.end + i;
    draft.tokens.push_back(at < length() ? ids_[size_t(at)] : draft.tokens[size_t(at - length())]);
  }
  return draft;
}

}  // namespace ingot::draft
