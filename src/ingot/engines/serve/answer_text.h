#pragma once
// What a client reads of an answer's ids, piece by piece: text, thoughts, calls of functions, logprobs. Pieces are
// whole characters, and together they are the text that ends before the first stop string.
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ingot/engines/serve/scheduler.h"
#include "ingot/models/registry.h"
#include "ingot/text/utf8.h"

namespace ingot {

// Text up to that of several strings which is complete first; they may come in any pieces: what could be the beginning
// of one waits.
class StopStrings {
 public:
  explicit StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) {}
  std::string push(std::string_view text);
  std::string finish();  // what still waited
  bool found() const { return found_; }
  const std::string& which() const { return which_; }  // the string that was found

 private:
  std::vector<std::string> stops_;
  std::string waiting_, which_;
  bool found_ = false;
};

struct CallPiece {
  size_t index = 0;
  std::string name;  // with the first piece of a call
  std::string arguments;
};
struct TokenInfo {
  int32_t id = -1;
  TokenLogprobs logprobs;
  int64_t offset = 0;     // bytes of text before it
  bool is_first = false;  // of all that the model was given, so that it has no logprobs
};
struct AnswerPiece {
  std::string text, reasoning;
  std::vector<CallPiece> calls;
  std::vector<TokenInfo> tokens;  // of the text
  bool empty() const { return text.empty() && reasoning.empty() && calls.empty() && tokens.empty(); }
};

class AnswerText {
 public:
  struct Options {
    bool chat = false;                   // the ids are an answer in the vocabulary's chat format
    std::vector<std::string> stop;       // ends the text; thoughts and calls go on
    std::vector<std::string> functions;  // that the request declares
  };
  // The vocabulary must outlive it.
  AnswerText(const Vocabulary& vocabulary, Options options);
  // Not for the stop id. `logprobs` may be null.
  AnswerPiece push(int32_t id, const TokenLogprobs* logprobs);
  AnswerPiece finish(int32_t stop_id);
  bool ended() const { return ended_; }  // no id that follows can add anything
  bool called() const { return calls_ > 0; }
  int64_t thought_tokens() const { return thought_tokens_; }         // without control tokens
  const std::string& stop_string() const { return stops_.which(); }  // the one that ended the text, or empty

 private:
  void add_deltas(AnswerPiece& piece, const std::vector<ChatDelta>& deltas);
  void add_text(AnswerPiece& piece, std::string_view text);
  void release(AnswerPiece& piece);
  const Vocabulary& vocabulary_;
  std::unique_ptr<ChatParser> parser_;
  Utf8Stream characters_;
  StopStrings stops_;
  bool ended_ = false;
  size_t calls_ = 0;
  int64_t thought_tokens_ = 0;
  int64_t read_ = 0, shown_ = 0;  // bytes of text
  std::vector<TokenInfo> tokens_;
};

}  // namespace ingot
