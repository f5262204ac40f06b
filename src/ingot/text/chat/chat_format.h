#pragma once
// A chat format: how a conversation becomes the token ids that a model was trained to see, which ids end its answer,
// and how the ids of an answer become thoughts, text and calls of functions.
//
// Servers and commands know formats by this interface alone; a model's kind says which format a vocabulary has
// (models/registry.h). A new format is one file that implements ChatFormat and ChatParser, as
// text/chat/harmony_format.cpp does for GPT-OSS, and its name in text/chat/templates.cpp.
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
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
  std::string thoughts;         // of the assistant: before its content
  std::vector<ChatCall> calls;  // of the assistant: after its content
  std::string label;            // of the assistant's content: ChatPart::label, where it is known
  std::string function;         // of a result: the function that was called
  std::string call_id;          // of a result: the call that it answers
  bool operator==(const ChatMessage&) const = default;
};
struct ChatConversation {
  std::vector<ChatMessage> messages;
  std::vector<ChatFunction> functions;  // that the model may call
  std::string identity;                 // who the model is told to be; empty: what it was trained with
  std::string date;                     // today, like 2026-01-31; empty: the model is not told
  std::string effort;                   // one of ChatFormat::efforts(); empty: the format's own default
  // The form of the answer, where the model is told of one: a name, a description and a JSON schema.
  std::string answer_name, answer_description, answer_schema;
};

// --- an answer
enum class ChatKind { thought, text, call };
const char* name_of(ChatKind k);
// A part of an answer. An answer is a list of parts: thoughts, texts and calls in the order in which they were written.
struct ChatPart {
  ChatKind kind = ChatKind::text;
  std::string label;    // the format's own name for such a part, such as "commentary"; may be empty
  std::string name;     // of a call: the function
  std::string content;  // of a call: its arguments
  bool operator==(const ChatPart&) const = default;
};
// What some ids add to an answer: more content of the part with this number, which begins where `begins` is set.
// Content is whole characters.
struct ChatDelta {
  size_t part = 0;
  bool begins = false;
  ChatPart added;  // kind, label and name of the part; the content that came
};
// The messages that a conversation keeps of an answer.
std::vector<ChatMessage> messages_of(const std::vector<ChatPart>& answer);

// Reads the ids of one answer as they are generated. Any ids are accepted, and no control token is ever shown.
class ChatParser {
 public:
  virtual ~ChatParser() = default;
  virtual std::vector<ChatDelta> push(int32_t id) = 0;
  virtual std::vector<ChatDelta> finish() = 0;  // no more ids; the id that ended the answer was pushed too
  // What the last id was content of; nothing for a control token or a token of a header.
  virtual std::optional<ChatKind> kind_of_last() const = 0;
  // The model has begun a turn that is not its own, so that its answer is over.
  virtual bool ended() const = 0;
};

// What an answer must be, for answers that are held to a grammar.
struct ChatAnswerForm {
  struct Call {
    std::string name;
    std::optional<Grammar::Rule> arguments;  // nothing: the function has no parameters
  };
  bool is_text = true;                // the answer may be text
  std::optional<Grammar::Rule> text;  // which text; nothing: any
  std::vector<Call> calls;            // the calls that it may be instead
};

// --- the format
// All members may be called from several threads at once.
class ChatFormat {
 public:
  virtual ~ChatFormat() = default;
  virtual const char* name() const = 0;
  // How long the model may be asked to think, from least to most; empty: the format has no such option.
  virtual std::vector<std::string> efforts() const = 0;
  // The ids of the conversation up to where the answer begins. Text never becomes a control token.
  virtual std::vector<int32_t> prompt(const ChatConversation& conversation) const = 0;
  virtual std::vector<int32_t> stop_ids() const = 0;
  virtual bool is_control(int32_t id) const = 0;
  // `functions`: those that the request declares.
  virtual std::unique_ptr<ChatParser> parser(std::vector<std::string> functions = {}) const = 0;
  // The language of answers of a form, from where the prompt ends to the id that ends the answer. Thoughts stay free.
  virtual Grammar::Rule answer_rule(Grammar& grammar, const ChatAnswerForm& form) const = 0;
  // The ids of the grammar's control symbols.
  virtual std::vector<int32_t> grammar_controls() const = 0;
};

// The known efforts: none, minimal, low, medium, high, xhigh, max.
const std::vector<std::string>& chat_efforts();
// The effort of a format that comes nearest to a known one, of two equally near ones the lesser; empty stays empty, and
// so does any where the format has none.
std::string nearest_effort(const ChatFormat& format, const std::string& effort);

}  // namespace ingot
