#pragma once
// Answers in a model's chat format: answer() to a conversation that the caller keeps, ChatAnswer id by id for callers
// that drive a decoder's slots themselves, and Chat, which keeps a conversation from turn to turn.
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ingot/engines/generate/session.h"
#include "ingot/text/chat/chat_format.h"
#include "ingot/text/tokenizer.h"

namespace ingot {

// What the model wrote in one turn, and how the turn ended.
struct ChatTurn {
  std::vector<ChatPart> parts;
  Answer answer;
  std::string called;  // the function whose result the model waits for, or empty
};
// New text of an answer: the part that it belongs to (whose content ends with the text), never half a character.
using ShowChat = std::function<void(const ChatPart& part, std::string_view text)>;

// Takes the ids of an answer as they are sampled. The format must outlive it.
class ChatAnswer {
 public:
  explicit ChatAnswer(const ChatFormat& format, ShowChat show = {}, std::vector<std::string> functions = {});
  // False: the model has begun a turn that is not its own, so that the answer is over. Not for the stop id.
  bool push(int32_t id);
  // The end of the ids; `answer` says how they came about, and goes into the turn.
  ChatTurn finish(Answer answer);

 private:
  void add(const std::vector<ChatDelta>& deltas);
  const std::unique_ptr<ChatParser> parser_;
  const ShowChat show_;
  std::vector<ChatPart> parts_;
};

// The answer to `conversation`. `options` gives limits and sampling; the ids that end an answer are added here, and ids
// that the tokenizer does not know are never sampled. A conversation for which the context has no room is Error{usage}.
ChatTurn answer(Session& session, const ChatFormat& format, const Tokenizer& tokenizer,
                const ChatConversation& conversation, SessionOptions options, const ShowChat& show = {});

class Chat {
 public:
  // The decoder, of which the chat takes a slot, format and tokenizer must outlive the chat. `opening`: the
  // conversation before the first turn, with what the model is told of itself.
  Chat(Decoder& decoder, const ChatFormat& format, const Tokenizer& tokenizer, ChatConversation opening);
  // A user's turn and the answer to it. `options` gives limits and sampling; the ids that end an answer are added here.
  // A turn that cannot be answered, such as one for which the context has no room, is an Error and leaves the
  // conversation as it was; an answer that was cancelled stays in it as far as it came.
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
