#include "ingot/text/chat/turns.h"

#include <algorithm>

#include "ingot/core/check.h"
#include "ingot/io/json.h"

namespace ingot {

std::optional<int32_t> token_named(const Tokenizer& tokenizer, std::string_view text) {
  const int32_t id = tokenizer.token_id(text);
  return id < 0 ? std::nullopt : std::optional<int32_t>(id);
}
int32_t required_special(const Tokenizer& tokenizer, std::string_view text, const std::string& where) {
  for (const SpecialToken& s : tokenizer.specials())
    if (s.text == text) return s.id;
  fail(ErrorCode::bad_data, where, ": found no token ", text, ", which the chat format needs");
}
bool is_special(const Tokenizer& tokenizer, int32_t id) {
  const auto specials = tokenizer.specials();
  const auto at = std::lower_bound(specials.begin(), specials.end(), id,
                                   [](const SpecialToken& s, int32_t wanted) { return s.id < wanted; });
  return at != specials.end() && at->id == id;
}

PromptIds& PromptIds::control(int32_t id) {
  encode_text();
  ids_.push_back(id);
  return *this;
}
std::vector<int32_t> PromptIds::finish() {
  encode_text();
  return std::move(ids_);
}
void PromptIds::encode_text() {
  if (text_.empty()) return;
  const std::vector<int32_t> ids = tokenizer_.encode(text_);
  ids_.insert(ids_.end(), ids.begin(), ids.end());
  text_.clear();
}

std::vector<ChatMessage> joined_turns(const std::vector<ChatMessage>& messages) {
  std::vector<ChatMessage> out;
  for (const ChatMessage& m : messages) {
    if (m.role != ChatRole::assistant || out.empty() || out.back().role != ChatRole::assistant) {
      out.push_back(m);
      continue;
    }
    ChatMessage& turn = out.back();
    turn.thoughts += m.thoughts, turn.content += m.content;
    turn.calls.insert(turn.calls.end(), m.calls.begin(), m.calls.end());
  }
  return out;
}

std::vector<ChatMessage> alternating_turns(const std::vector<ChatMessage>& messages) {
  std::vector<ChatMessage> out;
  for (ChatMessage& m : joined_turns(messages)) {
    const bool joins = m.role == ChatRole::user || m.role == ChatRole::instructions;
    if (joins && !out.empty() && out.back().role == m.role)
      out.back().content += "\n\n" + m.content;
    else
      out.push_back(std::move(m));
  }
  return out;
}

void refuse_functions(const ChatConversation& c, const char* name) {
  const auto uses = [](const ChatMessage& m) { return m.role == ChatRole::result || !m.calls.empty(); };
  if (!c.functions.empty())
    fail(ErrorCode::usage, "found functions that the model may call, which the chat format ", name,
         " does not support");
  if (std::any_of(c.messages.begin(), c.messages.end(), uses))
    fail(ErrorCode::usage, "found a call of a function or its result, which the chat format ", name,
         " does not support");
}

std::string trimmed(const std::string& text) {
  const char* const kSpace = " \t\n\v\f\r";
  const size_t begin = text.find_first_not_of(kSpace);
  return begin == text.npos ? "" : text.substr(begin, text.find_last_not_of(kSpace) + 1 - begin);
}

std::string take_system_text(const ChatConversation& c, std::vector<ChatMessage>& messages) {
  std::string text = c.identity;
  size_t n = 0;
  for (; n < messages.size() && messages[n].role == ChatRole::instructions; ++n)
    text += (text.empty() ? "" : "\n\n") + messages[n].content;
  messages.erase(messages.begin(), messages.begin() + int64_t(n));
  return text;
}

namespace {
std::string dumped(const OrderedJson& json) {
  std::string out;
  if (json.is_object()) {
    for (const auto& [key, value] : json.items())
      out += (out.empty() ? "" : ", ") + OrderedJson(key).dump() + ": " + dumped(value);
    return "{" + out + "}";
  }
  if (json.is_array()) {
    for (const OrderedJson& value : json) out += (out.empty() ? "" : ", ") + dumped(value);
    return "[" + out + "]";
  }
  return json.dump();
}
OrderedJson declaration_of(const ChatFunction& f) {
  OrderedJson function = {{"name", f.name}};
  if (!f.description.empty()) function["description"] = f.description;
  if (!f.parameters.empty()) function["parameters"] = OrderedJson::parse(f.parameters);
  return {{"type", "function"}, {"function", function}};
}
}  // namespace

std::string python_json(const std::string& text) {
  const OrderedJson json = OrderedJson::parse(text, nullptr, false);
  return json.is_discarded() ? text : dumped(json);
}
std::string function_declaration(const ChatFunction& f) { return dumped(declaration_of(f)); }

}  // namespace ingot
