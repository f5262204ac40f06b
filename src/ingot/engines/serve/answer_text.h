#pragma once
// Converts the ids of an answer to text, thoughts, calls of functions and logprobs, piece by piece. Pieces are whole
// characters; together the pieces of text are the text before the first stop string.
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ingot/engines/serve/scheduler.h"
#include "ingot/models/registry.h"
#include "ingot/text/utf8.h"

namespace ingot {

// Passes text on up to the stop string that is complete first. The text may be divided in any way: a suffix that could
// begin a stop string is withheld.
class StopStrings {
 public:
  explicit StopStrings(std::vector<std::string> stops) : stops_(std::move(stops)) {}
  std::string push(std::string_view text);
  std::string finish();  // the text that was withheld
  bool found() const { return found_; }
  const std::string& which() const { return which_; }  // the string that was found

 private:
  std::vector<std::string> stops_;
  std::string waiting_, which_;
  bool found_ = false;
};

struct CallPiece {
  size_t index = 0;
  std::string name;  // set in the first piece of a call
  std::string arguments;
  // The model's id of the call, set in the first piece; may be empty. The ids that clients receive end with this id, so
  // that a later prompt can show the call as the model wrote it.
  std::string id;
};
struct TokenInfo {
  int32_t id = -1;
  TokenLogprobs logprobs;
  int64_t offset = 0;      // bytes of text before the token
  int64_t characters = 0;  // whole characters of text before the token
  bool is_first = false;   // the first token of the prompt, which has no logprobs
};
struct AnswerPiece {
  std::string text, reasoning;
  std::vector<CallPiece> calls;
  std::vector<TokenInfo> tokens;  // of the text
  bool empty() const { return text.empty() && reasoning.empty() && calls.empty() && tokens.empty(); }
};

// Bytes as text: bytes of an incomplete character are replaced.
std::string shown_text(const std::string& bytes);
// The number of characters of a valid text.
int64_t characters_in(std::string_view text);

class AnswerText {
 public:
  struct Options {
    bool chat = false;                   // the ids are an answer in the vocabulary's chat format
    std::vector<std::string> stop;       // end the text; thoughts and calls are not searched
    std::vector<std::string> functions;  // the functions that the request declares
    bool one_call = false;               // a second call ends the answer before the call
  };
  // The vocabulary must outlive this object.
  AnswerText(const Vocabulary& vocabulary, Options options);
  // Call for every id except the stop id. `logprobs` may be null.
  AnswerPiece push(int32_t id, const TokenLogprobs* logprobs);
  AnswerPiece finish(int32_t stop_id);
  bool ended() const { return ended_; }                              // no later id can add anything
  bool called() const { return calls_ > 0 && !cut_call_; }           // the answer asks for the results of its calls
  int64_t thought_tokens() const { return thought_tokens_; }         // without control tokens
  const std::string& stop_string() const { return stops_.which(); }  // the stop string that ended the text, or empty

 private:
  void add_deltas(AnswerPiece& piece, const std::vector<ChatDelta>& deltas);
  void add_text(AnswerPiece& piece, std::string_view text);
  void release(AnswerPiece& piece);
  const Vocabulary& vocabulary_;
  std::unique_ptr<ChatParser> parser_;
  Utf8Stream characters_;
  StopStrings stops_;
  const bool one_call_;
  bool ended_ = false;
  bool cut_call_ = false;  // a stop id that is text ended the answer within a call
  size_t calls_ = 0;
  int64_t thought_tokens_ = 0;
  int64_t read_ = 0, shown_ = 0;  // bytes of text
  int64_t read_characters_ = 0;
  std::vector<TokenInfo> tokens_;
};

}  // namespace ingot
