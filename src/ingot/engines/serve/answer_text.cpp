#include "ingot/engines/serve/answer_text.h"

#include <algorithm>

namespace ingot {

std::string StopStrings::push(std::string_view text) {
  if (found_) return "";
  waiting_ += text;
  // Finds the stop string that is complete first, independently of how the text is divided. If two stop strings end at
  // the same character, the longer one counts.
  size_t begin = std::string::npos, end = std::string::npos;
  for (const std::string& stop : stops_)
    if (const size_t at = waiting_.find(stop); at != std::string::npos)
      if (at + stop.size() < end || (at + stop.size() == end && at < begin))
        begin = at, end = at + stop.size(), which_ = stop;
  if (begin != std::string::npos) {
    found_ = true;
    std::string out = waiting_.substr(0, begin);
    waiting_.clear();
    return out;
  }
  // The longest suffix of the text that begins a stop string.
  size_t held = 0;
  for (const std::string& stop : stops_)
    for (size_t n = std::min(stop.size() - 1, waiting_.size()); n > held; --n)
      if (waiting_.compare(waiting_.size() - n, n, stop, 0, n) == 0) held = n;
  std::string out = waiting_.substr(0, waiting_.size() - held);
  waiting_.erase(0, out.size());
  return out;
}
std::string StopStrings::finish() { return std::exchange(waiting_, {}); }

std::string shown_text(const std::string& bytes) {
  Utf8Stream stream;
  std::string text = stream.push(bytes);
  return text + stream.finish();
}

int64_t characters_in(std::string_view text) {
  // Every byte of a character but the first has the form 10xxxxxx.
  return std::count_if(text.begin(), text.end(), [](char c) { return (uint8_t(c) & 0xc0) != 0x80; });
}

AnswerText::AnswerText(const Vocabulary& vocabulary, Options options)
    : vocabulary_(vocabulary), stops_(std::move(options.stop)), one_call_(options.one_call) {
  if (options.chat) parser_ = vocabulary.chat->parser(std::move(options.functions));
}

void AnswerText::add_text(AnswerPiece& piece, std::string_view text) {
  read_ += int64_t(text.size());
  read_characters_ += characters_in(text);
  piece.text += stops_.push(text);
  if (stops_.found()) ended_ = true;
}

void AnswerText::add_deltas(AnswerPiece& piece, const std::vector<ChatDelta>& deltas) {
  for (const ChatDelta& d : deltas) {
    if (d.added.kind == ChatKind::call) {
      if (d.begins && one_call_ && calls_ == 1) {
        ended_ = true;
        return;
      }
      if (d.begins) ++calls_;
      piece.calls.push_back({.index = calls_ - 1,
                             .name = d.begins ? d.added.name : "",
                             .arguments = d.added.content,
                             .id = d.begins ? d.added.id : ""});
    } else if (d.added.kind == ChatKind::thought) {
      piece.reasoning += d.added.content;
    } else {
      add_text(piece, d.added.content);
    }
  }
}

// Releases the logprobs of the tokens whose text has been released.
void AnswerText::release(AnswerPiece& piece) {
  shown_ += int64_t(piece.text.size());
  auto it = tokens_.begin();
  while (it != tokens_.end() && it->offset < shown_) piece.tokens.push_back(std::move(*it++));
  tokens_.erase(tokens_.begin(), it);
}

AnswerPiece AnswerText::push(int32_t id, const TokenLogprobs* logprobs) {
  AnswerPiece piece;
  if (ended_) return piece;
  const int64_t before = read_, characters_before = read_characters_;
  std::optional<ChatKind> kind = ChatKind::text;
  if (parser_) {
    add_deltas(piece, parser_->push(id));
    if (parser_->ended()) ended_ = true;
    kind = parser_->kind_of_last();
    if (kind == ChatKind::thought) ++thought_tokens_;
  } else {
    add_text(piece, characters_.push(vocabulary_.tokenizer->added_bytes(id)));
  }
  if (logprobs != nullptr && kind == ChatKind::text)
    tokens_.push_back({.id = id, .logprobs = *logprobs, .offset = before, .characters = characters_before});
  release(piece);
  return piece;
}

AnswerPiece AnswerText::finish(int32_t stop_id) {
  AnswerPiece piece;
  if (!ended_ && parser_) {
    // A stop id of the request may be a text token. Its text is not part of the answer.
    if (stop_id >= 0 && vocabulary_.chat->is_control(stop_id))
      add_deltas(piece, parser_->push(stop_id));
    else
      cut_call_ = stop_id >= 0 && parser_->kind_of_last() == ChatKind::call;
    add_deltas(piece, parser_->finish());
  } else if (!ended_) {
    add_text(piece, characters_.finish());
  }
  if (!stops_.found()) piece.text += stops_.finish();
  release(piece);
  return piece;
}

}  // namespace ingot
