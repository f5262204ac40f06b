#include "ingot/text/chat/harmony_format.h"

#include <algorithm>

namespace ingot {
namespace {

const std::string kNamespace = "functions.";

// --- conversations
// The sentence that states the prescribed form of the answer to the model.
std::string answer_form_text(const ChatConversation& c) {
  return "# Response Formats\n\n## " + c.answer_name + "\n\n" +
         (c.answer_description.empty() ? "" : "// " + c.answer_description + "\n") + c.answer_schema;
}

// Appends the assistant's thoughts, text and calls. Text before a call is commentary, because a final message would end
// the turn.
void append_assistant(const ChatMessage& m, bool calls_follow, std::vector<HarmonyMessage>& to) {
  const auto say = [&](const std::string& channel, const std::string& text) {
    if (!text.empty()) to.push_back({.role = HarmonyRole::assistant, .channel = channel, .content = text});
  };
  say("analysis", m.thoughts);
  say(calls_follow || m.label == "commentary" ? "commentary" : "final", m.content);
  for (const ChatCall& c : m.calls)
    to.push_back({.role = HarmonyRole::assistant,
                  .recipient = kNamespace + c.name,
                  .channel = "commentary",
                  .content_type = "<|constrain|>json",
                  .content = c.arguments});
}

// --- answers
class Parser final : public ChatParser {
 public:
  Parser(const ByteBpe& tokenizer, const HarmonyTokens& tokens, std::vector<std::string> functions)
      : parser_(tokenizer, tokens), tokens_(tokens), functions_(std::move(functions)) {}

  std::vector<ChatDelta> push(int32_t id) override {
    last_.reset();
    if (ended_) return {};
    const size_t messages = parser_.messages().size();
    parser_.push(id);
    const auto& now = parser_.messages();
    // A control token either begins or ends the content of a message.
    if (tokens_.is_special(id))
      inside_ = now.size() > messages ? std::optional(kind_of(now.back())) : std::nullopt;
    else
      last_ = inside_;
    return new_content(false);
  }
  std::vector<ChatDelta> finish() override {
    last_.reset();
    parser_.finish();
    return ended_ ? std::vector<ChatDelta>() : new_content(true);
  }
  std::optional<ChatKind> kind_of_last() const override { return last_; }
  bool ended() const override { return ended_; }

 private:
  bool declares(const std::string& name) const {
    return std::find(functions_.begin(), functions_.end(), name) != functions_.end();
  }
  // The function that a message calls, or "". A model may omit the namespace "functions.", and may call a function that
  // the request does not declare; the client must see such a call to answer it.
  std::string called_function(const HarmonyMessage& m) const {
    const std::string& to = m.recipient;
    if (declares(to)) return to;
    for (const char* speaker : {"", "assistant", "user", "system", "developer"})
      if (to == speaker) return "";
    const std::string name =
        to.starts_with(kNamespace) && to.size() > kNamespace.size() ? to.substr(kNamespace.size()) : to;
    return declares(name) ? name : function_name_of(name);
  }
  ChatKind kind_of(const HarmonyMessage& m) const {
    return !called_function(m).empty() ? ChatKind::call : m.channel == "analysis" ? ChatKind::thought : ChatKind::text;
  }

  // The content added to each message since the last call. A turn of another role ends the answer.
  std::vector<ChatDelta> new_content(bool finished) {
    std::vector<ChatDelta> deltas;
    const std::vector<HarmonyMessage>& messages = parser_.messages();
    for (; message_ < messages.size(); ++message_, bytes_ = 0, begun_ = false) {
      const HarmonyMessage& m = messages[message_];
      if (m.role != HarmonyRole::assistant) {
        ended_ = true;
        break;
      }
      ChatPart added{.kind = kind_of(m), .label = m.channel, .name = called_function(m)};
      added.content = m.content.substr(bytes_);
      bytes_ = m.content.size();
      // A call without arguments is reported when its message is complete.
      const bool is_whole = finished || message_ + 1 < messages.size();
      const bool begins = !begun_ && (!added.content.empty() || (added.kind == ChatKind::call && is_whole));
      if (begins) {
        begun_ = true;
        ++parts_;
      }
      if (begins || !added.content.empty())
        deltas.push_back({.part = parts_ - 1, .begins = begins, .added = std::move(added)});
      if (message_ + 1 == messages.size()) break;  // this message may still grow
    }
    return deltas;
  }

  HarmonyParser parser_;
  const HarmonyTokens& tokens_;
  const std::vector<std::string> functions_;
  std::optional<ChatKind> inside_;  // the kind of the message whose content is being written
  std::optional<ChatKind> last_;
  bool ended_ = false, begun_ = false;  // begun_: the growing message already has a part
  size_t message_ = 0, bytes_ = 0;      // the growing message, and the number of its bytes that were processed
  size_t parts_ = 0;
};

// --- grammars
using Node = Grammar::Node;
enum Control { kStart, kEndOfMessage, kMessage, kChannel, kConstrain, kReturn, kCall };

class AnswerRule {
 public:
  AnswerRule(Grammar& g, const ChatAnswerForm& form) : g_(g), form_(form), header_(g.either({})) {}

  Grammar::Rule rule() {
    add_message("analysis");
    if (form_.is_text) add_final();
    // Text before a call belongs to the answer, which must be JSON where a format is requested.
    if (form_.is_text && !form_.text) add_message("commentary");
    for (const ChatAnswerForm::Call& c : form_.calls) add_call(c);
    return g_.rule(header_);
  }

 private:
  Node channel(const std::string& text, Node next) { return g_.control(kChannel, g_.text(text, next)); }
  // Adds a message that another message follows.
  void add_message(const std::string& name) {
    const Node next = g_.control(kEndOfMessage, g_.control(kStart, g_.text("assistant", header_)));
    g_.add(header_, channel(name, g_.control(kMessage, g_.any_text(next))));
  }
  // Accepts the spellings of the models' training, with and without the blank.
  Node typed(Node content) {
    const Node message = g_.control(kMessage, content);
    const Node type = g_.control(kConstrain, g_.text("json", message));
    return g_.either({message, type, g_.text(" ", type)});
  }
  void add_final() {
    const Node end = g_.control(kReturn, Grammar::kEnd);
    g_.add(header_,
           channel("final", form_.text ? typed(g_.call(*form_.text, end)) : g_.control(kMessage, g_.any_text(end))));
  }
  // The recipient of the call stands before the channel or after it.
  void add_call(const ChatAnswerForm::Call& c) {
    const Node end = g_.control(kCall, Grammar::kEnd);
    const std::string to = " to=" + kNamespace + c.name;
    const Node arguments = typed(c.arguments ? g_.call(*c.arguments, end) : g_.text("{}", end));
    g_.add(header_, g_.text(to, channel("commentary", arguments)));
    g_.add(header_, channel("commentary" + to, arguments));
  }

  Grammar& g_;
  const ChatAnswerForm& form_;
  const Node header_;  // follows the role
};

}  // namespace

std::vector<HarmonyMessage> harmony_messages(const ChatConversation& c) {
  HarmonySystem system{.current_date = c.date, .calls_functions = !c.functions.empty()};
  if (!c.identity.empty()) system.identity = c.identity;
  if (!c.effort.empty()) system.reasoning = c.effort;
  std::vector<HarmonyMessage> out = {{.role = HarmonyRole::system, .content = harmony_system_text(system)}};
  // Instructions at the beginning become the developer's message. The model was trained with a single developer
  // message, which also contains the functions.
  size_t i = 0;
  std::string instructions;
  for (; i < c.messages.size() && c.messages[i].role == ChatRole::instructions; ++i)
    instructions += (instructions.empty() ? "" : "\n\n") + c.messages[i].content;
  std::string developer = harmony_developer_text(instructions, c.functions);
  if (!c.answer_schema.empty()) developer += (developer.empty() ? "" : "\n\n") + answer_form_text(c);
  if (!developer.empty()) out.push_back({.role = HarmonyRole::developer, .content = developer});
  // For each message, whether the assistant calls a function before the next message of another role.
  std::vector<char> calls(c.messages.size() + 1, 0);
  for (size_t k = c.messages.size(); k-- > i;)
    calls[k] = c.messages[k].role == ChatRole::assistant && (calls[k + 1] != 0 || !c.messages[k].calls.empty());
  for (; i < c.messages.size(); ++i) {
    const ChatMessage& m = c.messages[i];
    switch (m.role) {
      case ChatRole::instructions:
        out.push_back({.role = HarmonyRole::developer, .content = harmony_developer_text(m.content, {})});
        break;
      case ChatRole::user: out.push_back({.role = HarmonyRole::user, .content = m.content}); break;
      case ChatRole::assistant: append_assistant(m, calls[i] != 0, out); break;
      case ChatRole::result:
        out.push_back({.role = HarmonyRole::tool,
                       .name = kNamespace + m.function,
                       .recipient = "assistant",
                       .channel = "commentary",
                       .content = m.content});
        break;
    }
  }
  return out;
}

HarmonyFormat::HarmonyFormat(std::shared_ptr<const ByteBpe> tokenizer, const std::string& where)
    : tokenizer_(std::move(tokenizer)), tokens_(*tokenizer_, where) {}

std::vector<int32_t> HarmonyFormat::prompt(const ChatConversation& conversation) const {
  return encode_harmony(render_harmony_prompt(harmony_messages(conversation)), *tokenizer_, tokens_);
}

// <|end|> ends only a message, so it is not among these ids.
std::vector<int32_t> HarmonyFormat::stop_ids() const {
  std::vector<int32_t> ids;
  for (const int32_t id : {tokens_.answer_end, tokens_.call, tokens_.end_of_text})
    if (id != tokens_.end) ids.push_back(id);
  return ids;
}

std::unique_ptr<ChatParser> HarmonyFormat::parser(std::vector<std::string> functions) const {
  return std::make_unique<Parser>(*tokenizer_, tokens_, std::move(functions));
}

Grammar::Rule HarmonyFormat::answer_rule(Grammar& grammar, const ChatAnswerForm& form) const {
  return AnswerRule(grammar, form).rule();
}

std::vector<int32_t> HarmonyFormat::grammar_controls() const {
  return {tokens_.start,     tokens_.end,        tokens_.message, tokens_.channel,
          tokens_.constrain, tokens_.answer_end, tokens_.call};
}

}  // namespace ingot
