#include "ingot/text/chat/turns.h"

#include <algorithm>

#include "ingot/core/check.h"
#include "ingot/io/json.h"

namespace ingot {

std::optional<int32_t> token_named(const ByteBpe& bpe, std::string_view text) {
  for (const SpecialToken& s : bpe.rules().specials)
    if (s.text == text) return s.id;
  for (const AddedToken& a : bpe.rules().added)
    if (bpe.rules().tokens[size_t(a.id)] == text) return a.id;
  return std::nullopt;
}
int32_t required_special(const ByteBpe& bpe, std::string_view text, const std::string& where) {
  for (const SpecialToken& s : bpe.rules().specials)
    if (s.text == text) return s.id;
  fail(ErrorCode::bad_data, where, ": found no token ", text, ", which the chat format needs");
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
  const std::vector<int32_t> ids = bpe_.encode(text_);
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
