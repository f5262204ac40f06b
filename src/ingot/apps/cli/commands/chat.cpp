// ingot chat: a conversation with a model that has a chat format, one turn per line.
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "ingot/apps/cli/shared/conversation.h"
#include "ingot/apps/cli/shared/runs.h"
#include "ingot/core/log.h"
#include "ingot/core/progress.h"
#include "ingot/io/json.h"
#include "ingot/text/utf8.h"

namespace ingot::cli {
namespace {

constexpr int64_t kContext = 8192;            // tokens, or the model's context if that is smaller
constexpr size_t kMaxLine = size_t(4) << 20;  // bytes of one turn

struct ChatCommand {
  std::string path, model, analysis = "auto";
  ConversationOptions conversation;
  SamplingOptions sampling;
  DecoderOptions on;
  DraftCommand draft;
  int64_t tokens = 0, context = 0;
  uint64_t seed = 1;
  std::vector<std::string> stop_ids;
  bool json = false;
};

// Reads the lines of standard input as they arrive.
class Lines {
 public:
  bool next(std::string& line) {
    while (true) {
      const size_t end = rest_.find('\n');
      if (end != std::string::npos || (ended_ && !rest_.empty())) {
        line = rest_.substr(0, end);
        rest_.erase(0, end == std::string::npos ? end : end + 1);
        if (line.ends_with('\r')) line.pop_back();
        return true;
      }
      if (ended_) return false;
      if (rest_.size() > kMaxLine)
        fail(ErrorCode::bad_data, "standard input: found a line of more than ", format_bytes(double(kMaxLine)),
             ", expected a turn of at most that");
      char bytes[1 << 16];
      const ssize_t n = ::read(STDIN_FILENO, bytes, sizeof bytes);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail(ErrorCode::io, "standard input: ", std::strerror(errno));
      ended_ = n == 0;
      rest_.append(bytes, size_t(std::max<ssize_t>(n, 0)));
    }
  }

 private:
  std::string rest_;
  bool ended_ = false;
};

class Conversation {
 public:
  Conversation(const ChatCommand& o, OpenedModel& model, const Vocabulary& vocabulary)
      : o_(o),
        model_(model),
        settings_(o.conversation),
        format_(*vocabulary.chat),
        chat_(*model.decoder, format_, *vocabulary.tokenizer, opening_of(o.conversation, format_)),
        draft_(draft_options(o.draft, *model.decoder)),
        stop_ids_(parse_stop_ids(o.stop_ids, model.decoder->vocab())),
        terminal_(isatty(STDIN_FILENO) == 1) {}

  void run() {
    if (terminal_) log_info(help());
    Lines lines;
    for (std::string line; prompt(), lines.next(line);) {
      for (std::string more; line.ends_with('\\');) {  // the turn continues on the next line
        line.back() = '\n';
        if (terminal_) write_out("  ");
        if (lines.next(more)) line += more;
      }
      const std::string typed = line.substr(0, line.find_last_not_of(" \t") + 1);
      if (typed.empty()) continue;
      if (typed == "/quit" || typed == "/exit") return;
      if (command(typed)) continue;
      if (!terminal_) {
        answer(line);
        continue;
      }
      try {
        answer(line);
      } catch (const Error& e) {  // the next turn may fit, or /new frees the context
        if (e.code == ErrorCode::interrupted) throw;
        log_error(e.what());
      }
    }
    if (terminal_) write_out("\n");
  }

 private:
  void prompt() const {
    if (terminal_) write_out("> ");
  }
  // On a terminal the chat continues after a wrong command.
  void refuse(const std::string& message) const {
    if (!terminal_) fail(ErrorCode::usage, message);
    log_error(message);
  }
  std::string efforts() const {
    std::string all;
    for (const std::string& effort : format_.efforts()) all += (all.empty() ? "" : "|") + effort;
    return all;
  }
  std::string help() const {
    return "/new starts over, " +
           (efforts().empty() ? "" : "/effort " + efforts() + " changes how long the model thinks, ") +
           "/quit ends; a line that ends in \\ continues on the next one; Ctrl-C stops an answer";
  }
  bool command(const std::string& line) {
    if (line == "/help") {
      log_info(help());
    } else if (line == "/new") {
      chat_.start_over(opening_of(settings_, format_));
    } else if (line.starts_with("/effort ")) {
      const std::string effort = line.substr(8);
      const std::vector<std::string>& known = chat_efforts();
      if (format_.efforts().empty()) {
        refuse("/effort: the chat format " + std::string(format_.name()) + " has no levels of reasoning");
      } else if (std::find(known.begin(), known.end(), effort) == known.end()) {
        refuse("/effort: found '" + effort + "', expected one of " + efforts());
      } else {
        settings_.reasoning = effort;
        chat_.set_opening(opening_of(settings_, format_));
      }
    } else if (looks_like_command(line)) {
      refuse("found the command '" + line + "', expected one of /new, " +
             (format_.efforts().empty() ? "" : "/effort " + efforts() + ", ") +
             "/quit and /help; a blank in front of it makes it text");
    } else {
      return false;
    }
    return true;
  }
  // "/word" alone, or a known command with a wrong number of words; "/usr/bin is a directory" is text.
  static bool looks_like_command(const std::string& line) {
    const std::string word = line.substr(0, line.find_first_of(" \t"));
    for (const char* ours : {"/new", "/effort", "/quit", "/exit", "/help"})
      if (word == ours) return true;
    return word.size() > 1 && word[0] == '/' && line.find_last_not_of(" \t") < word.size() &&
           std::all_of(word.begin() + 1, word.end(), [](unsigned char c) { return c >= 'a' && c <= 'z'; });
  }

  void answer(const std::string& line) {
    require_utf8(line, "standard input");
    const Interrupt interrupt;
    AnswerPrinter printer(o_.analysis == "show" || (o_.analysis == "auto" && isatty(STDOUT_FILENO) == 1));
    const int64_t tokens = o_.tokens > 0 ? o_.tokens : model_.decoder->context();
    SessionOptions options{.tokens = tokens, .sampling = o_.sampling, .stop_ids = stop_ids_};
    options.seed = o_.seed + turns_++ * 0x9e3779b97f4a7c15u;  // every turn has its own random numbers
    options.cancelled = [&] { return interrupt.asked(); };
    options.draft = draft_;
    Progress progress;
    if (isatty(STDERR_FILENO) == 1)
      options.on_prompt = [&](int64_t done, int64_t all) {
        if (done < all) progress.update("prompt " + with_commas(done) + "/" + with_commas(all) + " tokens");
      };
    const ChatTurn turn = chat_.say(line, options, [&](const ChatPart& part, std::string_view text) {
      if (!o_.json) printer.show(part, text);
    });
    if (o_.json)
      write_out(json_of(turn, o_.draft.any()) + "\n");
    else
      printer.end();
    const std::string ending = ending_line(turn, model_.decoder->context(), tokens);
    log_info("[", speed_line(turn.answer, o_.draft.any()), ending.empty() ? "" : "; ", ending, "]");
    if (interrupt.signal() == SIGTERM) fail(ErrorCode::interrupted, "stopped by a signal");
  }

  const ChatCommand& o_;
  OpenedModel& model_;
  ConversationOptions settings_;
  const ChatFormat& format_;
  Chat chat_;
  draft::Options draft_;
  std::vector<int32_t> stop_ids_;
  bool terminal_;
  uint64_t turns_ = 0;
};

void chat(const ChatCommand& o, const Command& c) {
  const std::string path = chosen_model(o.path, o.model, "PATH");
  require_chat(path);
  const Vocabulary vocabulary = load_vocabulary(path, vocabulary_options(o.conversation, true));
  refuse_unused(c, *vocabulary.chat, o.conversation.date);
  OpenedModel model = open_model(path, context_of(path, o.context, kContext), "--context", o.on);
  Conversation(o, model, vocabulary).run();
}

}  // namespace

void add_chat(Command& root) {
  Command& c = root.add(
      "chat", "Chats with a model such as GPT-OSS; each line of input is a turn, and a line that ends in \\ continues");
  auto o = std::make_shared<ChatCommand>();
  c.text("PATH", o->path,
         "a published model with its tokenizer: a checkpoint's directory, an archive, a GGUF or an .iris file");
  c.text("--model PATH", o->model, "the same as PATH");
  add_options(c, o->conversation);
  add_options(c, o->sampling);
  c.unsigned_integer("--seed N", o->seed, "the same seed and turns give the same answers (default: 1)");
  c.integer("--tokens N", o->tokens, 0, 1 << 30,
            "at most N tokens per answer; 0: as many as fit into the context (default: 0)");
  c.integer("--context N", o->context, 0, 1 << 30,
            "longest conversation in tokens; 0: 8192, or the model's context if that is shorter (default: 0)");
  add_stop_ids(c, o->stop_ids);
  c.choice("--analysis WHEN", o->analysis, {"auto", "show", "hide"},
           "whether the model's reasoning is printed; auto: on a terminal (default: auto)");
  add_options(c, o->on);
  add_gpu_options(c, o->on);
  add_dense(c, o->on.dense);
  add_options(c, o->draft);
  c.flag("--json", o->json, "print one JSON object per answer: messages, ids, the reason for the end, the times");
  c.examples(R"(  ingot chat --model gpt-oss-20b
  ingot chat --model gpt-oss-20b --reasoning high --developer "Answer in French." --temperature 0.7
  printf 'What is 2 + 2?\nAnd half of it?\n' | ingot chat --model gpt-oss-20b --temperature 0 --json)");
  c.run([o, &c] {
    refuse_split_of_one(c, o->on.gpus);
    choose_draft_head(c, o->draft, o->on);
    chat(*o, c);
  });
}

}  // namespace ingot::cli
