#pragma once
// A chat format: converts a conversation to the token ids that a model was trained on, names the ids that end an
// answer, and splits the ids of an answer into thoughts, text and calls of functions.
//
// Servers and commands use formats through this interface only; a model's kind says which format a vocabulary has
// (models/registry.h). A new format is one file that implements ChatFormat and ChatParser, such as
// text/chat/harmony_format.cpp for GPT-OSS, and an entry in text/chat/templates.cpp.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ingot/text/grammar/grammar.h"

namespace ingot {

// --- a conversation
struct ChatFunction {
  std::string name, description;
  std::string parameters;  // a JSON schema, or empty: none
};
struct ChatCall {
  std::string id, name, arguments;  // arguments: JSON text as the model wrote it
  bool operator==(const ChatCall&) const = default;
};
enum class ChatRole { instructions, user, assistant, result };
struct ChatMessage {
  ChatRole role = ChatRole::user;
  std::string content;
  std::string thoughts;         // of the assistant: thoughts before the content
  std::vector<ChatCall> calls;  // of the assistant: calls after the content
  std::string label;            // of the assistant's content: ChatPart::label, if known
  std::string function;         // of a result: the function that was called
  std::string call_id;          // of a result: the call that the result answers
  bool operator==(const ChatMessage&) const = default;
};
struct ChatConversation {
  std::vector<ChatMessage> messages;
  std::vector<ChatFunction> functions;  // functions that the model may call
  std::string identity;                 // the identity that the model should state; empty: the default of its training
  std::string date;                     // today's date, such as 2026-01-31; empty: the prompt has no date
  std::string effort;                   // one of ChatFormat::efforts(); empty: the format's own default
  // The form of the answer as stated to the model: a name, a description and a JSON schema.
  std::string answer_name, answer_description, answer_schema;
};

// --- an answer
enum class ChatKind { thought, text, call };
const char* name_of(ChatKind k);
// A part of an answer. An answer is a list of parts: thoughts, texts and calls in the order in which they were written.
struct ChatPart {
  ChatKind kind = ChatKind::text;
  std::string label;    // the format's own name for such a part, such as "commentary"; may be empty
  std::string name;     // of a call: the name of the function
  std::string content;  // of a call: the arguments
  std::string id;       // of a call: the id that the model gave to the call; may be empty
  bool operator==(const ChatPart&) const = default;
};
// The content that some ids add to an answer. The content belongs to the part with number `part`, and is the part's
// first if `begins` is set. Content consists of whole characters.
struct ChatDelta {
  size_t part = 0;
  bool begins = false;
  ChatPart added;  // kind, label and name of the part, and the new content
};
// Converts an answer to the messages that a conversation keeps of it.
std::vector<ChatMessage> messages_of(const std::vector<ChatPart>& answer);

// Parses the ids of one answer as they are generated. Accepts any ids, and never passes on a control token.
class ChatParser {
 public:
  virtual ~ChatParser() = default;
  virtual std::vector<ChatDelta> push(int32_t id) = 0;
  // call after the last id; the id that ended the answer must have been pushed too
  virtual std::vector<ChatDelta> finish() = 0;
  // The kind of content to which the last id belongs; empty for a control token or a token of a header.
  virtual std::optional<ChatKind> kind_of_last() const = 0;
  // The model has begun a turn of a different role, so its answer is over.
  virtual bool ended() const = 0;
};

// The prescribed form of an answer that is constrained by a grammar.
struct ChatAnswerForm {
  struct Call {
    std::string name;
    std::optional<Grammar::Rule> arguments;  // nothing: the function has no parameters
  };
  bool is_text = true;                // whether the answer may be text
  std::optional<Grammar::Rule> text;  // the rule of the text; nothing: any text
  std::vector<Call> calls;            // the calls that the answer may consist of instead
};

// --- the format
// All members may be called from several threads at once.
class ChatFormat {
 public:
  virtual ~ChatFormat() = default;
  virtual const char* name() const = 0;
  // How long the model can be asked to think, from least to most; empty: the format has no such option.
  virtual std::vector<std::string> efforts() const = 0;
  // The ids of the conversation up to the beginning of the answer. Text never becomes a control token.
  virtual std::vector<int32_t> prompt(const ChatConversation& conversation) const = 0;
  virtual std::vector<int32_t> stop_ids() const = 0;
  virtual bool is_control(int32_t id) const = 0;
  // `functions` are the functions that the request declares.
  virtual std::unique_ptr<ChatParser> parser(std::vector<std::string> functions = {}) const = 0;
  // The rule of the answers of a form, from the end of the prompt to the id that ends the answer. Thoughts stay free.
  virtual Grammar::Rule answer_rule(Grammar& grammar, const ChatAnswerForm& form) const = 0;
  // The ids of the grammar's control symbols.
  virtual std::vector<int32_t> grammar_controls() const = 0;
};

// The name of a function has 1 to kMostNameBytes letters, digits, _ and -, as in Anthropic's API. OpenAI's API
// allows 64.
constexpr size_t kMostNameBytes = 128;
bool is_function_name(std::string_view name);
// A name of this form for a call of a function that a model named `written`, which must not be empty: a client can
// return the call.
std::string function_name_of(std::string written);

// The known efforts: none, minimal, low, medium, high, xhigh, max.
const std::vector<std::string>& chat_efforts();
// The format's effort nearest to a known effort, the lesser of two equally near ones. Empty for an empty effort, and
// for a format without efforts.
std::string nearest_effort(const ChatFormat& format, const std::string& effort);

}  // namespace ingot
