#pragma once
// Options and output that chat and generate share for models with a chat format.
#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/shared/models.h"
#include "ingot/engines/generate/chat.h"
#include "ingot/io/json.h"

namespace ingot::cli {

struct ConversationOptions {
  std::string tokenizer, chat_format, reasoning = "medium", system, developer, date;
};
void add_options(Command& c, ConversationOptions& o);
void add_chat_format(Command& c, std::string& name);
VocabularyOptions vocabulary_options(const ConversationOptions& o, bool chat = false);
void add_options(Command& c, SamplingOptions& o);
// --stop-id, and its ids for a model with a vocabulary of this size.
void add_stop_ids(Command& c, std::vector<std::string>& words);
std::vector<int32_t> parse_stop_ids(const std::vector<std::string>& words, int64_t vocab);
// Throws if --reasoning was given and the format has no levels of reasoning, or if `date` is a date, given by --date,
// and the format's prompts have none.
void refuse_unused(const Command& c, const ChatFormat& format, const std::string& date);
void check_date(const std::string& date);  // Error{usage} that names --date
// The conversation before the first turn, for a model of this format.
ChatConversation opening_of(const ConversationOptions& o, const ChatFormat& format);

// Writes answers as they arrive: text to standard output; thoughts if requested, dimmed on a terminal. On a terminal,
// control characters are left out.
class AnswerPrinter {
 public:
  explicit AnswerPrinter(bool analysis);
  void show(const ChatPart& part, std::string_view text);
  void end();  // ends the answer, with a line break if one is missing
 private:
  void paint(bool dim);
  bool analysis_, terminal_, dimmed_ = false;
  ChatPart latest_;  // only its kind and label are used
  bool begun_ = false, line_open_ = false;
};
// The version of the reports of `generate --json` and `chat --json`. Since version 2, a seed's tokens follow
// docs/sampling.md.
constexpr int kAnswerVersion = 2;
// One line. `drafts`: whether drafts were asked for; their counts are then part of the report, also where they are 0.
std::string json_of(const ChatTurn& turn, bool drafts);
// "42 tokens, 11.8 tokens/s, 9 of 12 draft tokens accepted; prompt 130 tokens, 96 of them reused, 0.4 s"
std::string speed_line(const Answer& a, bool drafts);
// {"steps": n, "tokens": n, "accepted": n} of an answer with drafts: the steps with a draft, and its tokens.
OrderedJson json_of(const draft::Counts& drafts);
// A note for the user if the answer did not end by itself, or empty.
std::string ending_line(const ChatTurn& turn, int64_t context, int64_t tokens);

}  // namespace ingot::cli
