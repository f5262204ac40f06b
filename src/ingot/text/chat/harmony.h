#pragma once
// Harmony, the conversation format of GPT-OSS:
//   <|start|>ROLE[ to=RECIPIENT][<|channel|>CHANNEL][ TYPE]<|message|>CONTENT<|end|>
// Rendering gives pieces that are encoded separately, so that a user's text never becomes a control token. Parsing
// reads token ids, never text, accepts any sequence of ids, and never returns a control token.
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ingot/text/byte_bpe.h"
#include "ingot/text/chat/chat_format.h"
#include "ingot/text/utf8.h"

namespace ingot {

// --- messages
enum class HarmonyRole { system, developer, user, assistant, tool };
const char* name_of(HarmonyRole r);

struct HarmonyMessage {
  HarmonyRole role = HarmonyRole::user;
  std::string name;          // the name of a tool, such as functions.get_weather; otherwise empty
  std::string recipient;     // the tool that the message calls, or empty
  std::string channel;       // analysis, commentary, final, or empty
  std::string content_type;  // such as "<|constrain|>json", or empty
  std::string content;
  bool operator==(const HarmonyMessage&) const = default;
};

using HarmonyFunction = ChatFunction;
struct HarmonyNamespace {
  std::string name, description;
  std::vector<HarmonyFunction> functions;
};
// The text of a system message.
struct HarmonySystem {
  std::string identity = "You are ChatGPT, a large language model trained by OpenAI.";
  std::string knowledge_cutoff = "2024-06", current_date;  // empty: no line
  std::string reasoning = "medium";                        // low, medium, high; empty: no line
  std::vector<HarmonyNamespace> tools;                     // built in, such as browser
  std::vector<std::string> channels = {"analysis", "commentary", "final"};
  // a developer message declares functions, which the model calls on the commentary channel
  bool calls_functions = false;
};
std::string harmony_system_text(const HarmonySystem& s);
// The text of a developer message: instructions and functions (namespace "functions"), each of which may be empty.
std::string harmony_developer_text(const std::string& instructions, const std::vector<HarmonyFunction>& functions);
// Describes a JSON schema as a type in the notation that the model knows.
std::string harmony_type(const std::string& schema);

// --- rendering
struct HarmonyPiece {
  bool control = false;  // a control token by name, or text to encode on its own
  std::string text;
};
std::vector<HarmonyPiece> render_harmony(const HarmonyMessage& m);
// Renders a whole conversation, for training or inspection. Where the last assistant message is final, the analysis
// before the first final message is left out, as in the published library.
std::vector<HarmonyPiece> render_harmony(std::span<const HarmonyMessage> conversation, bool drop_analysis = true);
// A prompt: the conversation and <|start|>assistant, after which the model writes its next turn. A final message ends a
// turn, and the analysis of ended turns (all before the last final message) is left out, as the model was trained to
// see a prompt; the turn under way keeps its analysis.
std::vector<HarmonyPiece> render_harmony_prompt(std::span<const HarmonyMessage> conversation,
                                                bool drop_analysis = true);
std::string harmony_text(std::span<const HarmonyPiece> pieces);  // for display and tests; never encoded

// --- ids
// The control tokens that a conversation needs.
inline constexpr const char* kHarmonyControls[] = {"<|start|>",     "<|end|>",    "<|message|>", "<|channel|>",
                                                   "<|constrain|>", "<|return|>", "<|call|>"};
// The control tokens of a vocabulary. A vocabulary that lacks one of kHarmonyControls is refused (bad_data) with
// `where` in the message.
struct HarmonyTokens {
  int32_t start, end, message, channel, constrain, answer_end, call;  // answer_end: <|return|>
  int32_t end_of_text;                                                // <|endoftext|>, or `end` where there is none
  std::vector<uint8_t> special;                                       // by id: a control or reserved token
  HarmonyTokens(const ByteBpe& tokenizer, const std::string& where);
  bool is_special(int32_t id) const { return id < 0 || size_t(id) >= special.size() || special[size_t(id)] != 0; }
};
std::vector<int32_t> encode_harmony(std::span<const HarmonyPiece> pieces, const ByteBpe& tokenizer,
                                    const HarmonyTokens& tokens);

// Reads a model's answer id by id. Any ids are accepted: an incomplete header keeps the fields read so far, a message
// may begin without <|start|>, and reserved tokens are dropped.
class HarmonyParser {
 public:
  // `answering`: the ids follow <|start|>assistant, as the ids of a model's answer do.
  HarmonyParser(const ByteBpe& tokenizer, const HarmonyTokens& tokens, bool answering = true);
  // Returns the text that the id adds to the content of the current message; never half a character.
  std::string push(int32_t id);
  void finish();  // call after the last id
  // An unfinished message is the last element once its content has begun.
  const std::vector<HarmonyMessage>& messages() const { return messages_; }

 private:
  enum class State { between, header, content };
  void control(int32_t id);
  void begin_content();
  void close();
  const ByteBpe& tokenizer_;
  const HarmonyTokens& tokens_;
  State state_ = State::between;
  std::string header_;    // the header's text; control tokens are single bytes that no text contains
  bool started_ = false;  // the header follows <|start|>
  Utf8Stream stream_;
  std::vector<HarmonyMessage> messages_;
};

}  // namespace ingot
