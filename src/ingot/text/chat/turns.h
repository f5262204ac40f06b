#pragma once
// Shared code of the formats in which each message is one text between control tokens: a writer of ids, turns, and the
// JSON of templates.
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ingot/text/chat/chat_format.h"
#include "ingot/text/tokenizer.h"

namespace ingot {

// The id of a special token, or of an added token that ordinary text may contain; empty if there is none.
std::optional<int32_t> token_named(const Tokenizer& tokenizer, std::string_view text);
// The id of a special token that must exist; otherwise Error{bad_data} with `where`.
int32_t required_special(const Tokenizer& tokenizer, std::string_view text, const std::string& where);
bool is_special(const Tokenizer& tokenizer, int32_t id);

// Collects the ids of a prompt. The text between two control tokens is encoded as one text, like in the tokenizer of
// the template's authors; text never becomes a control token.
class PromptIds {
 public:
  explicit PromptIds(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  PromptIds& control(int32_t id);
  PromptIds& text(std::string_view text) {
    text_ += text;
    return *this;
  }
  std::vector<int32_t> finish();

 private:
  void encode_text();
  const Tokenizer& tokenizer_;
  std::string text_;
  std::vector<int32_t> ids_;
};

// The messages of a conversation as models see them: consecutive messages of the assistant are joined into one.
std::vector<ChatMessage> joined_turns(const std::vector<ChatMessage>& messages);
// The same for a model that was trained with turns that alternate: consecutive messages of the user are also joined,
// with a blank line between, and so are consecutive instructions.
std::vector<ChatMessage> alternating_turns(const std::vector<ChatMessage>& messages);
// Removes instructions at the beginning from `messages`, a single message as in the templates, and returns the identity
// and these instructions, separated by a blank line. Returns nothing for a conversation with neither; instructions may
// be empty, which is not the same.
std::optional<std::string> take_system_text(const ChatConversation& conversation, std::vector<ChatMessage>& messages);

// Error{usage} for functions, calls and results: the format `name` supports none of these.
void refuse_functions(const ChatConversation& conversation, const char* name);
// Without Unicode's white space at both ends, as the filter trim of a template.
std::string trimmed(const std::string& text);

// JSON as Python's json.dumps writes it with ensure_ascii=False, which is the result of tojson in a template. Text that
// is not JSON is returned unchanged.
std::string python_json(const std::string& json);
// The declaration of a function in the form of OpenAI's interface.
std::string function_declaration(const ChatFunction& function);

}  // namespace ingot
