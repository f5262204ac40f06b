#pragma once
// What the formats of one text between control tokens share: a writer of ids, turns, and the JSON of templates.
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ingot/text/byte_bpe.h"
#include "ingot/text/chat/chat_format.h"

namespace ingot {

// The id of a special token or of an added one that ordinary text may hold; empty where there is none.
std::optional<int32_t> token_named(const ByteBpe& bpe, std::string_view text);
// The same of a special token that must be there: Error{bad_data} names `where`.
int32_t required_special(const ByteBpe& bpe, std::string_view text, const std::string& where);

// The ids of a prompt. Text between two control tokens is encoded in one piece, as the tokenizer of the template's
// authors does; it never becomes a control token.
class PromptIds {
 public:
  explicit PromptIds(const ByteBpe& bpe) : bpe_(bpe) {}
  PromptIds& control(int32_t id);
  PromptIds& text(std::string_view text) {
    text_ += text;
    return *this;
  }
  std::vector<int32_t> finish();

 private:
  void encode_text();
  const ByteBpe& bpe_;
  std::string text_;
  std::vector<int32_t> ids_;
};

// The messages of a conversation as models see them: one message for all that the assistant said before somebody else
// speaks.
std::vector<ChatMessage> joined_turns(const std::vector<ChatMessage>& messages);
// Takes the instructions at the beginning out of `messages`: the identity and these instructions, a blank line between.
std::string take_system_text(const ChatConversation& conversation, std::vector<ChatMessage>& messages);

// JSON as Python's json.dumps writes it with ensure_ascii=False: what tojson gives in a template. Text that is no JSON
// stays as it is.
std::string python_json(const std::string& json);
// The declaration of a function in the form of OpenAI's interface.
std::string function_declaration(const ChatFunction& function);

}  // namespace ingot
