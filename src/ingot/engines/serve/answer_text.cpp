#include "ingot/engines/serve/answer_text.h"

#include <algorithm>

namespace ingot {

std::string StopStrings::push(std::string_view text) {
  if (found_) return "";
  waiting_ += text;
  // The one that is complete first, however the pieces lie; of two that end together the longer.
  size_t begin = std::string::npos, end = std::string::npos;
  for (const std::string& stop : stops_)
    if (const size_t at = waiting_.find(stop); at != std::string::npos)
      if (at + stop.size() < end || (at + stop.size() == end && at < begin)) begin = at, end = at + stop.size();
  if (begin != std::string::npos) {
    found_ = true;
    std::string out = waiting_.substr(0, begin);
    waiting_.clear();
    return out;
  }
  // The longest end of the text that begins a stop string.
  size_t held = 0;
  for (const std::string& stop : stops_)
    for (size_t n = std::min(stop.size() - 1, waiting_.size()); n > held; --n)
      if (waiting_.compare(waiting_.size() - n, n, stop, 0, n) == 0) held = n;
  std::string out = waiting_.substr(0, waiting_.size() - held);
  waiting_.erase(0, out.size());
  return out;
}
std::string StopStrings::finish() { return std::exchange(waiting_, {}); }

AnswerText::AnswerText(const Vocabulary& vocabulary, Options options)
    : vocabulary_(vocabulary), options_(std::move(options)), stops_(options_.stop) {
  if (options_.harmony) parser_.emplace(*vocabulary.bpe, *vocabulary.harmony);
}

void AnswerText::add_text(AnswerPiece& piece, std::string_view text) {
  read_ += int64_t(text.size());
  piece.text += stops_.push(text);
  if (stops_.found()) ended_ = true;
}

// The function that a message calls, or "". A model may leave out the namespace "functions.", and may call a function
// that the request does not declare: a client must see such a call to answer it. A name that no API would take back
// becomes one that every API takes.
std::string AnswerText::called_function(const HarmonyMessage& m) const {
  const std::string& to = m.recipient;
  const auto is_declared = [&](const std::string& name) {
    return std::find(options_.functions.begin(), options_.functions.end(), name) != options_.functions.end();
  };
  if (is_declared(to)) return to;
  for (const char* speaker : {"", "assistant", "user", "system", "developer"})
    if (to == speaker) return "";
  std::string name = to.starts_with("functions.") && to.size() > 10 ? to.substr(10) : to;
  if (is_declared(name)) return name;
  constexpr size_t kLongest = 64;
  name.resize(std::min(name.size(), kLongest));
  for (char& c : name)
    if (!(c >= 'a' && c <= 'z') && !(c >= 'A' && c <= 'Z') && !(c >= '0' && c <= '9') && c != '-') c = '_';
  return name;
}
AnswerText::Inside AnswerText::inside(const HarmonyMessage& m) const {
  return !called_function(m).empty() ? Inside::call : m.channel == "analysis" ? Inside::thought : Inside::text;
}

// What each message gained since the last look. A turn that is not the assistant's ends the answer.
void AnswerText::read_harmony(AnswerPiece& piece, bool finished) {
  const std::vector<HarmonyMessage>& messages = parser_->messages();
  for (; message_ < messages.size(); ++message_, bytes_ = 0) {
    const HarmonyMessage& m = messages[message_];
    if (m.role != HarmonyRole::assistant) {
      ended_ = true;
      return;
    }
    const std::string added = m.content.substr(bytes_);
    const bool first = bytes_ == 0;
    bytes_ = m.content.size();
    const Inside in = inside(m);
    if (in == Inside::call) {
      // The first piece has the name: it waits for an argument, or for the end of a call that has none.
      const bool whole = finished || message_ + 1 < messages.size();
      const bool says = !added.empty() || (first && whole);
      if (first && says) ++calls_;
      if (says)
        piece.calls.push_back({.index = calls_ - 1, .name = first ? called_function(m) : "", .arguments = added});
    } else if (in == Inside::thought) {
      piece.reasoning += added;
    } else {
      add_text(piece, added);
    }
    if (message_ + 1 == messages.size()) return;  // it may still grow
  }
}

// Logprobs of what has been shown.
void AnswerText::release(AnswerPiece& piece) {
  shown_ += int64_t(piece.text.size());
  auto it = tokens_.begin();
  while (it != tokens_.end() && it->offset < shown_) piece.tokens.push_back(std::move(*it++));
  tokens_.erase(tokens_.begin(), it);
}

AnswerPiece AnswerText::push(int32_t id, const TokenLogprobs* logprobs) {
  AnswerPiece piece;
  if (ended_) return piece;
  const int64_t before = read_;
  bool of_text = true;
  if (parser_) {
    const size_t messages = parser_->messages().size();
    parser_->push(id);
    const auto& now = parser_->messages();
    // A control token begins the content of a message or ends it.
    if (vocabulary_.harmony->is_special(id))
      inside_ = now.size() > messages ? inside(now.back()) : Inside::header;
    else if (inside_ == Inside::thought)
      ++thought_tokens_;
    of_text = inside_ == Inside::text && !vocabulary_.harmony->is_special(id);
    read_harmony(piece, false);
  } else {
    add_text(piece, characters_.push(vocabulary_.tokenizer->decode({&id, 1})));
  }
  if (logprobs != nullptr && of_text) tokens_.push_back({.id = id, .logprobs = *logprobs, .offset = before});
  release(piece);
  return piece;
}

AnswerPiece AnswerText::finish(int32_t stop_id) {
  AnswerPiece piece;
  if (parser_) {
    if (stop_id >= 0 && !ended_) parser_->push(stop_id);
    parser_->finish();
    if (!ended_) read_harmony(piece, true);
  } else if (!ended_) {
    add_text(piece, characters_.finish());
  }
  if (!stops_.found()) piece.text += stops_.finish();
  release(piece);
  return piece;
}

}  // namespace ingot
