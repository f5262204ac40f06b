#include "ingot/text/chat/turns.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>

#include "ingot/core/check.h"
#include "ingot/io/json.h"
#include "ingot/io/utf8.h"
#include "ingot/text/utf8.h"

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

namespace {
// The characters that Python's str.strip() removes.
bool is_python_space(char32_t c) {
  return (c >= '\t' && c <= '\r') || (c >= 0x1C && c <= ' ') || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}
}  // namespace

std::string trimmed(const std::string& text) {
  if (find_invalid_utf8(text) >= 0) return text;  // refused later, where the text is encoded
  size_t begin = text.size(), end = 0;
  for (size_t i = 0; i < text.size();) {
    const Utf8Char c = utf8_decode(text.data() + i);
    if (!is_python_space(c.code)) begin = std::min(begin, i), end = i + size_t(c.length);
    i += size_t(c.length);
  }
  return end == 0 ? "" : text.substr(begin, end - begin);
}

std::optional<std::string> take_system_text(const ChatConversation& c, std::vector<ChatMessage>& messages) {
  const bool instructed = !messages.empty() && messages[0].role == ChatRole::instructions;
  if (!instructed && c.identity.empty()) return {};
  std::string text = c.identity;
  if (instructed) {
    text += (text.empty() || messages[0].content.empty() ? "" : "\n\n") + messages[0].content;
    messages.erase(messages.begin());
  }
  return text;
}

namespace {
// As Python's repr(): the shortest digits that give the same number, without an exponent from 1e-4 up to 1e16.
std::string number_text(double x) {
  char text[32];
  const double size = std::abs(x);
  const bool fixed = size == 0 || (size >= 1e-4 && size < 1e16);
  const auto end =
      std::to_chars(text, std::end(text), x, fixed ? std::chars_format::fixed : std::chars_format::scientific);
  std::string out(text, end.ptr);
  return fixed && out.find('.') == std::string::npos ? out + ".0" : out;
}
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
  return json.is_number_float() ? number_text(json.get<double>()) : json.dump();
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
