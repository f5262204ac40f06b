#pragma once
// Answers in a model's chat format: answer() to a conversation of the caller, ChatAnswer id by id for callers with
// their own use of a decoder's slots, and Chat, which keeps a conversation from turn to turn.
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ingot/engines/generate/session.h"
#include "ingot/text/chat/chat_format.h"
#include "ingot/text/tokenizer.h"

namespace ingot {

// The model's messages of a turn, and the reason of the turn's end.
struct ChatTurn {
  std::vector<ChatPart> parts;
  Answer answer;
  std::string called;  // the function whose result the model waits for, or empty
};
// New text of an answer: the text's part (its content ends with the new text), never half a character.
using ShowChat = std::function<void(const ChatPart& part, std::string_view text)>;

// Takes the ids of an answer as they are sampled. The format must outlive the ChatAnswer.
class ChatAnswer {
 public:
  explicit ChatAnswer(const ChatFormat& format, ShowChat show = {}, std::vector<std::string> functions = {});
  // Returns false when the model has begun a turn of a different role: the answer is over. Not called with the stop id.
  bool push(int32_t id);
  // The end of the ids; `answer` describes their generation, and becomes part of the turn.
  ChatTurn finish(Answer answer);

 private:
  void add(const std::vector<ChatDelta>& deltas);
  const ChatFormat& format_;
  const std::unique_ptr<ChatParser> parser_;
  const ShowChat show_;
  std::vector<ChatPart> parts_;
};

// The answer to `conversation`. `options` gives limits and sampling; this function adds the stop ids of an answer, and
// never samples ids unknown to the tokenizer. A conversation too long for the context is Error{usage}.
ChatTurn answer(Session& session, const ChatFormat& format, const Tokenizer& tokenizer,
                const ChatConversation& conversation, SessionOptions options, const ShowChat& show = {});

class Chat {
 public:
  // Decoder (the chat takes a slot), format and tokenizer must outlive the chat. `opening`: the conversation before the
  // first turn, with the instructions for the model.
  Chat(Decoder& decoder, const ChatFormat& format, const Tokenizer& tokenizer, ChatConversation opening);
  // A user's turn and the answer to it. `options` gives limits and sampling; this function adds the stop ids of an
  // answer. A turn without a possible answer, such as a turn too long for the context, is an Error and does not change
  // the conversation; a cancelled answer stays in the conversation as far as generated.
  ChatTurn say(const std::string& text, SessionOptions options, const ShowChat& show = {});
  void start_over(ChatConversation opening);
  void set_opening(ChatConversation opening);  // the turns stay
  const ChatConversation& conversation() const { return conversation_; }

 private:
  Session session_;
  const ChatFormat& format_;
  const Tokenizer& tokenizer_;
  ChatConversation conversation_;
  size_t opening_;  // messages before the first turn
};

}  // namespace ingot
