#include "ingot/text/chat/chat_format.h"

#include <algorithm>
#include <cstdlib>

namespace ingot {

const char* name_of(ChatKind k) {
  switch (k) {
    case ChatKind::thought: return "thought";
    case ChatKind::text: return "text";
    case ChatKind::call: return "call";
  }
  return "?";
}

std::vector<ChatMessage> messages_of(const std::vector<ChatPart>& answer) {
  std::vector<ChatMessage> messages;
  for (const ChatPart& p : answer) {
    ChatMessage m{.role = ChatRole::assistant};
    if (p.kind == ChatKind::call)
      m.calls.push_back({.id = p.id, .name = p.name, .arguments = p.content});
    else if (p.kind == ChatKind::thought)
      m.thoughts = p.content;
    else
      m.content = p.content, m.label = p.label;
    messages.push_back(std::move(m));
  }
  return messages;
}

namespace {
bool may_be_in_a_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
}
}  // namespace

bool is_function_name(std::string_view name) {
  return !name.empty() && name.size() <= kMostNameBytes && std::all_of(name.begin(), name.end(), may_be_in_a_name);
}
std::string function_name_of(std::string written) {
  written.resize(std::min(written.size(), kMostNameBytes));
  std::replace_if(
      written.begin(), written.end(), [](char c) { return !may_be_in_a_name(c); }, '_');
  return written;
}

const std::vector<std::string>& chat_efforts() {
  static const std::vector<std::string> efforts = {"none", "minimal", "low", "medium", "high", "xhigh", "max"};
  return efforts;
}

std::string nearest_effort(const ChatFormat& format, const std::string& effort) {
  const std::vector<std::string>& scale = chat_efforts();
  const auto rank = [&](const std::string& e) { return std::find(scale.begin(), scale.end(), e) - scale.begin(); };
  std::string best;
  if (effort.empty()) return best;
  for (const std::string& own : format.efforts())
    if (best.empty() || std::abs(rank(own) - rank(effort)) < std::abs(rank(best) - rank(effort))) best = own;
  return best;
}

}  // namespace ingot
