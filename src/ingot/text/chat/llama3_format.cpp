#include "ingot/text/chat/llama3_format.h"

#include <algorithm>
#include <ctime>

#include "ingot/core/check.h"
#include "ingot/io/json.h"
#include "ingot/text/chat/answer_parser.h"

namespace ingot {
namespace {

const char kCallRules[] =
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best "
    "answers the given prompt.\n\nRespond in the format {\"name\": function name, \"parameters\": dictionary of "
    "argument "
    "name and its value}.Do not use variables.\n\n";

// A date like "26 Jul 2024", which is the templates' date where a conversation has none.
std::string spoken_date(const std::string& date) {
  std::tm day{};
  if (date.empty() || ::strptime(date.c_str(), "%Y-%m-%d", &day) == nullptr) return "26 Jul 2024";
  char text[32];
  return std::string(text, std::strftime(text, sizeof text, "%d %b %Y", &day));
}

}  // namespace

Llama3Format::Llama3Format(std::shared_ptr<const Tokenizer> tokenizer, const Llama3Style& style,
                           const std::string& where)
    : tokenizer_(std::move(tokenizer)),
      style_(style),
      begin_(required_special(*tokenizer_, "<|begin_of_text|>", where)),
      header_begin_(required_special(*tokenizer_, "<|start_header_id|>", where)),
      header_end_(required_special(*tokenizer_, "<|end_header_id|>", where)),
      end_(required_special(*tokenizer_, "<|eot_id|>", where)) {}

void Llama3Format::header(const char* role, PromptIds& out) const {
  out.control(header_begin_).text(role).control(header_end_).text("\n\n");
}

// Writes a message; `before` precedes its text.
void Llama3Format::write(const ChatMessage& m, const std::string& before, PromptIds& out) const {
  switch (m.role) {
    case ChatRole::instructions: header("system", out); break;
    case ChatRole::user: header("user", out); break;
    case ChatRole::assistant: header("assistant", out); break;
    case ChatRole::result: header("ipython", out); break;
  }
  if (m.calls.size() > 1)
    fail(ErrorCode::usage, "found ", m.calls.size(), " calls in a message, of which the chat format ", name(),
         " supports one");
  if (!m.calls.empty() && style_.dates_and_calls)
    out.text("{\"name\": \"" + m.calls[0].name + "\", \"parameters\": " + python_json(m.calls[0].arguments) + "}");
  else if (m.role == ChatRole::result)
    out.text(OrderedJson(m.content).dump());
  else
    out.text(before + trimmed(m.content));
  out.control(end_);
}

std::vector<int32_t> Llama3Format::prompt(const ChatConversation& c) const {
  if (!style_.dates_and_calls) refuse_functions(c, name());
  std::vector<ChatMessage> messages = joined_turns(c.messages);
  const std::optional<std::string> system = take_system_text(c, messages);
  const bool calls = style_.dates_and_calls && !c.functions.empty();
  PromptIds out(*tokenizer_);
  out.control(begin_);
  if (style_.dates_and_calls) {
    header("system", out);
    out.text(std::string(calls ? "Environment: ipython\n" : "") +
             "Cutting Knowledge Date: December 2023\nToday Date: " + spoken_date(c.date) + "\n\n" +
             trimmed(system.value_or("")));
    out.control(end_);
  } else if (system) {
    write({.role = ChatRole::instructions, .content = *system}, "", out);
  }
  // The functions are declared before the first question.
  bool declared = !calls;
  for (const ChatMessage& m : messages) {
    std::string before;
    if (!declared && m.role == ChatRole::user) {
      before = kCallRules;
      for (const ChatFunction& f : c.functions) before += OrderedJson::parse(function_declaration(f)).dump(4) + "\n\n";
      declared = true;
    }
    write(m, before, out);
  }
  header("assistant", out);
  return out.finish();
}

std::vector<int32_t> Llama3Format::stop_ids() const {
  std::vector<int32_t> ids = {end_};
  for (const char* name : {"<|end_of_text|>", "<|eom_id|>"})
    if (const auto id = token_named(*tokenizer_, name)) ids.push_back(*id);
  return ids;
}

bool Llama3Format::is_control(int32_t id) const { return is_special(*tokenizer_, id); }

std::unique_ptr<ChatParser> Llama3Format::parser(std::vector<std::string> functions) const {
  AnswerTokens tokens{.turn = header_begin_};
  if (style_.dates_and_calls) tokens.json_functions = std::move(functions);
  return make_answer_parser(*tokenizer_, tokens);
}

Grammar::Rule Llama3Format::answer_rule(Grammar& g, const ChatAnswerForm& form) const {
  using Node = Grammar::Node;
  const Node end = g.control(0, Grammar::kEnd), answer = g.either({});
  if (form.is_text && form.text) g.add(answer, g.call(*form.text, end));
  if (form.is_text && !form.text) {
    // The parser may take an answer whose first character is { for a call, so beside functions no text begins with one.
    const Grammar::Set blank = Grammar::bytes(" \n"), brace = Grammar::bytes("{");
    const Node text = g.either({end, g.one_of(Grammar::range(0, 255) & ~(blank | brace), g.any_text(end))});
    g.add(text, g.one_of(blank, text));
    g.add(answer, form.calls.empty() ? g.any_text(end) : text);
  }
  for (const ChatAnswerForm::Call& c : form.calls) {
    const Node close = g.text("}", end);
    const Node arguments = c.arguments ? g.call(*c.arguments, close) : g.text("{}", close);
    g.add(answer, g.text("{\"name\": \"" + c.name + "\", \"parameters\": ", arguments));
  }
  return g.rule(answer);
}

}  // namespace ingot
