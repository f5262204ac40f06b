#pragma once
// What a client reads of an answer's ids, piece by piece: text, thoughts, calls of functions, logprobs. Pieces are
// whole characters, and together they are the text that ends before the first stop string.
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ingot/engines/serve/scheduler.h"
#include "ingot/models/registry.h"

namespace ingot {

// Text up to that of several strings which is complete first; they may come in any pieces: what could be the beginning
// of one waits.
class StopStrings {
 public:
  explicit StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) {}
  std::string push(std::string_view text);
  std::string finish();  // what still waited
  bool found() const { return found_; }

 private:
  std::vector<std::string> stops_;
  std::string waiting_;
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
    bool harmony = false;
    std::vector<std::string> stop;       // ends the text; thoughts and calls go on
    std::vector<std::string> functions;  // declared by the request, so that a call may name one without its namespace
  };
  // The vocabulary must outlive it.
  AnswerText(const Vocabulary& vocabulary, Options options);
  // Not for the stop id. `logprobs` may be null.
  AnswerPiece push(int32_t id, const TokenLogprobs* logprobs);
  AnswerPiece finish(int32_t stop_id);
  bool ended() const { return ended_; }  // no id that follows can add anything
  bool called() const { return calls_ > 0; }
  int64_t thought_tokens() const { return thought_tokens_; }  // without control tokens

 private:
  void read_harmony(AnswerPiece& piece, bool finished);
  std::string called_function(const HarmonyMessage& m) const;
  void add_text(AnswerPiece& piece, std::string_view text);
  void release(AnswerPiece& piece);
  const Vocabulary& vocabulary_;
  const Options options_;
  std::optional<HarmonyParser> parser_;
  Utf8Stream characters_;
  StopStrings stops_;
  enum class Inside { header, thought, text, call };
  Inside inside(const HarmonyMessage& m) const;
  bool ended_ = false;
  Inside inside_ = Inside::header;
  size_t message_ = 0, bytes_ = 0;  // the message that grows, and its bytes that were read
  size_t calls_ = 0;
  int64_t thought_tokens_ = 0;
  int64_t read_ = 0, shown_ = 0;  // bytes of text
  std::vector<TokenInfo> tokens_;
};

}  // namespace ingot
