#include "ingot/apps/cli/shared/conversation.h"

#include <unistd.h>

#include <algorithm>

#include "ingot/io/json.h"
#include "ingot/text/chat/date.h"
#include "ingot/text/chat/templates.h"

namespace ingot::cli {
namespace {

// The text without characters that move a terminal's cursor or change its colours or title.
std::string harmless(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = uint8_t(text[i]);
    const bool c1 = byte == 0xc2 && i + 1 < text.size() && uint8_t(text[i + 1]) < 0xa0;  // U+0080 to U+009F
    if (c1) ++i;
    if (!c1 && (byte >= 32 || byte == '\n' || byte == '\t') && byte != 127) out += text[i];
  }
  return out;
}

bool has_date(const ChatFormat& format) {
  const auto prompt_of = [&](const char* date) {
    return format.prompt({.messages = {{.role = ChatRole::user, .content = "Hi"}}, .date = date});
  };
  return prompt_of("2026-01-31") != prompt_of("2026-02-01");
}

}  // namespace

void add_options(Command& c, ConversationOptions& o) {
  c.text("--tokenizer FILE", o.tokenizer,
         "a tokenizer.json or .tiktoken of the model's vocabulary (default: the file beside the model)");
  add_chat_format(c, o.chat_format);
  c.choice("--reasoning EFFORT", o.reasoning, {"none", "low", "medium", "high"},
           "how long the model thinks: none, low, medium or high; a model without this level uses the nearest one "
           "(default: medium)");
  c.text("--system TEXT", o.system, "the model's identity in the system message (default: the one of its training)")
      .allow_empty();
  c.text("--developer TEXT", o.developer, "developer message: instructions with precedence over the user's")
      .allow_empty();
  c.text("--date DATE", o.date, "the date in the system message, or none (default: today)");
}
void add_chat_format(Command& c, std::string& name) {
  c.choice("--chat-format NAME", name, chat_format_names(),
           "the chat format, in place of the one that the model's template indicates");
}
VocabularyOptions vocabulary_options(const ConversationOptions& o, bool chat) {
  return {.tokenizer = o.tokenizer, .chat = chat, .chat_format = o.chat_format};
}
void add_options(Command& c, SamplingOptions& o) {
  c.number("--temperature X", o.temperature, 0, 100,
           "temperature of sampling; 0 takes the most likely token (default: 1)");
  c.integer("--top-k N", o.top_k, 0, 1 << 30, "sample among the N most likely tokens; 0: all (default: 0)");
  c.number("--top-p X", o.top_p, 1e-9, 1,
           "sample among the most likely tokens whose probabilities add up to X (default: 1)");
  c.number("--min-p X", o.min_p, 0, 1, "drop tokens less than X times as likely as the most likely token (default: 0)");
}

void add_stop_ids(Command& c, std::vector<std::string>& words) {
  c.list("--stop-id N", words, "a token id that also ends an answer; may be repeated").of_integers();
}
std::vector<int32_t> parse_stop_ids(const std::vector<std::string>& words, int64_t vocab) {
  std::vector<int32_t> ids;
  for (const std::string& word : words) {
    const Json id = Json::parse(word, nullptr, false);
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= uint64_t(vocab))
      fail(ErrorCode::usage, "--stop-id: found '", word, "', expected an id from 0 to ", vocab - 1);
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}
void refuse_unused(const Command& c, const ChatFormat& format, const std::string& date) {
  const std::string where = "the chat format " + std::string(format.name());
  if (format.efforts().empty()) c.refuse_given({"reasoning"}, where + ", which has no levels of it");
  const bool is_chosen = !date.empty() && date != "today" && date != "none";
  if (is_chosen && !has_date(format)) c.refuse_given({"date"}, where + ", whose prompts have no date");
}

void check_date(const std::string& date) {
  if (!is_date(date)) fail(ErrorCode::usage, "--date: found '", date, "', expected one like 2026-01-31, or none");
}

ChatConversation opening_of(const ConversationOptions& o, const ChatFormat& format) {
  if (!o.date.empty() && o.date != "none") check_date(o.date);
  ChatConversation opening{.identity = o.system, .effort = nearest_effort(format, o.reasoning)};
  opening.date = o.date == "none" ? "" : o.date.empty() ? today() : o.date;
  if (!o.developer.empty()) opening.messages.push_back({.role = ChatRole::instructions, .content = o.developer});
  return opening;
}

AnswerPrinter::AnswerPrinter(bool analysis) : analysis_(analysis), terminal_(isatty(STDOUT_FILENO) == 1) {}

void AnswerPrinter::paint(bool dim) {
  if (dim != dimmed_ && terminal_) write_out(dim ? "\x1b[2m" : "\x1b[0m");
  dimmed_ = dim;
}

void AnswerPrinter::show(const ChatPart& part, std::string_view text) {
  const bool thought = part.kind != ChatKind::text;  // the arguments of a call are not part of the answer either
  if (thought && !analysis_) return;
  if (begun_ && (part.kind != latest_.kind || part.label != latest_.label)) write_out(line_open_ ? "\n\n" : "\n");
  latest_ = {.kind = part.kind, .label = part.label};
  begun_ = true;
  paint(thought);
  const std::string out = terminal_ ? harmless(text) : std::string(text);
  write_out(out);
  if (!out.empty()) line_open_ = out.back() != '\n';
}

void AnswerPrinter::end() {
  paint(false);
  if (line_open_) write_out("\n");
  begun_ = line_open_ = false;
}

std::string json_of(const ChatTurn& turn, bool drafts) {
  OrderedJson r;
  r["version"] = kAnswerVersion;
  r["messages"] = OrderedJson::array();
  for (const ChatPart& p : turn.parts) {
    OrderedJson message = {{"kind", name_of(p.kind)}, {"channel", p.label}, {"content", p.content}};
    // `recipient` is the earlier name
    if (p.kind == ChatKind::call) message["function"] = message["recipient"] = p.name;
    r["messages"].push_back(message);
  }
  const Answer& a = turn.answer;
  r["finish"] = turn.called.empty() ? name_of(a.finish) : "call";
  r["ids"] = a.tokens;
  r["prompt_tokens"] = a.prompt;
  r["known_tokens"] = a.reused;
  r["prompt_seconds"] = a.prompt_seconds;
  r["token_seconds"] = a.token_seconds;
  if (drafts) r["drafts"] = json_of(a.drafts);
  return show_json(r);
}

OrderedJson json_of(const draft::Counts& drafts) {
  return {{"steps", drafts.drafts}, {"tokens", drafts.tokens}, {"accepted", drafts.accepted}};
}

std::string speed_line(const Answer& a, bool drafts) {
  std::string line = with_commas(int64_t(a.tokens.size())) + " tokens";
  // The first token comes with the prompt's logits.
  if (a.tokens.size() > 1 && a.token_seconds > 0)
    line += ", " + fixed(double(a.tokens.size() - 1) / a.token_seconds, 1) + " tokens/s";
  // If the measured costs never make a draft worthwhile, the answer has no drafts, and the user should know this.
  if (drafts && a.drafts.tokens == 0) line += ", no drafts";
  if (drafts && a.drafts.tokens > 0)
    line += ", " + with_commas(a.drafts.accepted) + " of " + with_commas(a.drafts.tokens) + " draft tokens accepted";
  line += "; prompt " + with_commas(a.prompt) + " tokens";
  if (a.reused > 0) line += ", " + with_commas(a.reused) + " of them reused";
  return line + ", " + fixed(a.prompt_seconds, 1) + " s";
}

std::string ending_line(const ChatTurn& turn, int64_t context, int64_t tokens) {
  if (!turn.called.empty())
    return "the model calls " + turn.called + " and waits for its result, which nothing here can give";
  switch (turn.answer.finish) {
    case Finish::context:
      return "the context of " + with_commas(context) + " tokens is full: the answer is cut, --context gives more room";
    case Finish::length: return "the answer is cut at " + with_commas(tokens) + " tokens, --tokens gives more";
    case Finish::cancelled: return "stopped";
    case Finish::stop: break;
  }
  return "";
}

}  // namespace ingot::cli
