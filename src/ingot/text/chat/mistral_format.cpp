#include "ingot/text/chat/mistral_format.h"

#include <algorithm>

#include "ingot/io/codecs/sha256.h"
#include "ingot/io/json.h"
#include "ingot/text/chat/answer_parser.h"

namespace ingot {
namespace {

constexpr size_t kIdLength = 9;
const char kAlphanumeric[] = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

std::string json_string(const std::string& text) { return OrderedJson(text).dump(); }

// Whether the tokenizer puts a space in front of every text, even of a text that begins with a space, as SentencePiece
// does.
bool adds_space(const Tokenizer& tokenizer) {
  std::string bytes;
  for (const int32_t id : tokenizer.encode(" a")) bytes += tokenizer.token_bytes(id);
  return bytes.starts_with("  ");
}

}  // namespace

std::string mistral_call_id(const std::string& id) {
  const std::string end = id.size() < kIdLength ? "" : id.substr(id.size() - kIdLength);
  const bool fits = !end.empty() && end.find_first_not_of(kAlphanumeric) == end.npos;
  return fits ? end : sha256(id).substr(0, kIdLength);
}

MistralFormat::MistralFormat(std::shared_ptr<const Tokenizer> tokenizer, const MistralStyle& style,
                             const std::string& where, std::string default_system)
    : tokenizer_(std::move(tokenizer)),
      style_(style),
      default_system_(std::move(default_system)),
      writes_spaces_(style.spaces && !adds_space(*tokenizer_)),
      begin_(required_special(*tokenizer_, "<s>", where)),
      end_(required_special(*tokenizer_, "</s>", where)),
      question_begin_(required_special(*tokenizer_, "[INST]", where)),
      question_end_(required_special(*tokenizer_, "[/INST]", where)),
      functions_begin_(required_special(*tokenizer_, "[AVAILABLE_TOOLS]", where)),
      functions_end_(required_special(*tokenizer_, "[/AVAILABLE_TOOLS]", where)),
      calls_(required_special(*tokenizer_, "[TOOL_CALLS]", where)),
      result_begin_(required_special(*tokenizer_, "[TOOL_RESULTS]", where)),
      result_end_(required_special(*tokenizer_, "[/TOOL_RESULTS]", where)) {
  if (style_.version < 7) return;
  system_begin_ = required_special(*tokenizer_, "[SYSTEM_PROMPT]", where);
  system_end_ = required_special(*tokenizer_, "[/SYSTEM_PROMPT]", where);
  result_content_ = required_special(*tokenizer_, "[TOOL_CONTENT]", where);
}

void MistralFormat::write_text(const std::string& text, PromptIds& out) const {
  if (writes_spaces_) out.text(" ");
  out.text(text);
}

// Version 3 has no turn for instructions: all of them stand in front of the last question. The default text is used
// where a conversation of version 3 has no instructions at all, or a conversation of version 7 has none at the start;
// empty instructions count as instructions.
std::string MistralFormat::take_instructions(const ChatConversation& c, std::vector<ChatMessage>& messages) const {
  const auto instructs = [](const ChatMessage& m) { return m.role == ChatRole::instructions; };
  const auto looked_at = messages.begin() + (style_.version >= 7 ? std::min<int64_t>(1, int64_t(messages.size()))
                                                                 : int64_t(messages.size()));
  if (c.identity.empty() && std::none_of(messages.begin(), looked_at, instructs)) return default_system_;
  std::string text = take_system_text(c, messages).value_or("");
  if (style_.version >= 7) return text;
  std::erase_if(messages, [&](const ChatMessage& m) {
    if (m.role != ChatRole::instructions) return false;
    text += (text.empty() ? "" : "\n\n") + m.content;
    return true;
  });
  return text;
}

void MistralFormat::write_question(const ChatConversation& c, const std::string& text, bool last,
                                   PromptIds& out) const {
  if (last && !c.functions.empty()) {
    std::string list;
    for (const ChatFunction& f : c.functions) list += (list.empty() ? "" : ", ") + function_declaration(f);
    out.control(functions_begin_);
    write_text("[" + list + "]", out);
    out.control(functions_end_);
  }
  out.control(question_begin_);
  write_text(text, out);
  out.control(question_end_);
}

void MistralFormat::write_answer(const ChatMessage& m, PromptIds& out) const {
  // A message of version 3 is text or calls.
  if (!m.content.empty() && (m.calls.empty() || style_.version >= 7))
    write_text(style_.version < 7 && style_.spaces ? trimmed(m.content) : m.content, out);
  if (!m.calls.empty()) {
    std::string list;
    for (const ChatCall& call : m.calls)
      list += (list.empty() ? "" : ", ") + ("{\"name\": " + json_string(call.name)) +
              ", \"arguments\": " + python_json(call.arguments) + ", \"id\": " + json_string(mistral_call_id(call.id)) +
              "}";
    out.control(calls_);
    write_text("[" + list + "]", out);
  }
  out.control(end_);
}

void MistralFormat::write_result(const ChatMessage& m, PromptIds& out) const {
  const std::string id = mistral_call_id(m.call_id);
  out.control(result_begin_);
  if (style_.version >= 7) {
    write_text(id, out);
    out.control(result_content_);
    write_text(m.content, out);
  } else {
    const bool is_json = !OrderedJson::parse(m.content, nullptr, false).is_discarded();
    write_text("{\"content\": " + (is_json ? python_json(m.content) : json_string(m.content)) +
                   ", \"call_id\": " + json_string(id) + "}",
               out);
  }
  out.control(result_end_);
}

std::vector<int32_t> MistralFormat::prompt(const ChatConversation& c) const {
  std::vector<ChatMessage> messages = alternating_turns(c.messages);
  const std::string instructions = take_instructions(c, messages);
  const auto is_question = [](const ChatMessage& m) { return m.role == ChatRole::user; };
  if (std::none_of(messages.begin(), messages.end(), is_question) && style_.version < 7 && !instructions.empty())
    messages.insert(messages.begin(), {.role = ChatRole::user});
  PromptIds out(*tokenizer_);
  out.control(begin_);
  const auto write_system = [&](const std::string& text) {
    out.control(system_begin_);
    write_text(text, out);
    out.control(system_end_);
  };
  if (style_.version >= 7 && !instructions.empty()) write_system(instructions);
  const auto last = std::find_if(messages.rbegin(), messages.rend(), is_question);
  for (const ChatMessage& m : messages) {
    const bool is_last = last != messages.rend() && &m == &*last;
    const bool has_instructions = is_last && style_.version < 7 && !instructions.empty();
    switch (m.role) {
      case ChatRole::instructions: write_system(m.content); break;
      case ChatRole::user: {
        const char* const between = has_instructions && !m.content.empty() ? "\n\n" : "";
        write_question(c, (has_instructions ? instructions : "") + between + m.content, is_last, out);
        break;
      }
      case ChatRole::assistant: write_answer(m, out); break;
      case ChatRole::result: write_result(m, out); break;
    }
  }
  return out.finish();
}

std::unique_ptr<ChatParser> MistralFormat::parser(std::vector<std::string>) const {
  return make_answer_parser(*tokenizer_,
                            {.turn = question_begin_, .call_begin = calls_, .space_before_parts = style_.spaces});
}

Grammar::Rule MistralFormat::answer_rule(Grammar& g, const ChatAnswerForm& form) const {
  using Node = Grammar::Node;
  const Node end = g.control(0, Grammar::kEnd), answer = g.either({});
  const auto spaced = [&](Node next) { return style_.spaces ? g.either({next, g.text(" ", next)}) : next; };
  if (form.is_text && form.text) g.add(answer, spaced(g.call(*form.text, end)));
  if (form.is_text && !form.text) g.add(answer, g.any_text(end));
  for (const ChatAnswerForm::Call& c : form.calls) {
    Node id = g.text("\"}]", end);
    for (size_t i = 0; i < kIdLength; ++i) id = g.one_of(Grammar::bytes(kAlphanumeric), id);
    const Node after = g.text(", \"id\": \"", id);
    const Node arguments = c.arguments ? g.call(*c.arguments, after) : g.text("{}", after);
    const Node call = g.text("[{\"name\": " + json_string(c.name) + ", \"arguments\": ", arguments);
    g.add(answer, g.control(1, spaced(call)));
  }
  return g.rule(answer);
}

}  // namespace ingot
