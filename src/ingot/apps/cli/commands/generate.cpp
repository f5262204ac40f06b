// ingot generate: text or token ids from a model.
#include <unistd.h>

#include <algorithm>
#include <filesystem>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/shared/adaptation.h"
#include "ingot/apps/cli/shared/conversation.h"
#include "ingot/apps/cli/shared/models.h"
#include "ingot/apps/cli/shared/runs.h"
#include "ingot/core/log.h"
#include "ingot/engines/serve/answer_text.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"
#include "ingot/text/utf8.h"

namespace ingot::cli {
namespace {

struct GenerateCommand {
  std::string run, model, prompt, file, ids;
  SyntheticOptions synthetic;
  std::string path;    // the model, given as `run`, `model` or `synthetic`
  bool asked = false;  // whether a prompt was given, possibly an empty one
  int64_t tokens = 200;
  uint64_t seed = 1;
  DecoderOptions on;
  DraftCommand draft;
  SamplingOptions sampling;
  ConversationOptions conversation;
  AdaptationCommand ttt;
  std::vector<std::string> stop_ids, stops;
  std::string trace;
  bool only_new = false, past_end = false, json = false, raw = false;
};

OrderedJson report_of(const Answer& a, bool drafts) {
  OrderedJson r;
  r["version"] = kAnswerVersion;
  r["ids"] = a.tokens;
  r["finish"] = name_of(a.finish);
  if (a.finish == Finish::stop && a.stop_id >= 0) r["stop_id"] = a.stop_id;
  r["prompt_tokens"] = a.prompt;
  r["prompt_seconds"] = a.prompt_seconds;
  r["token_seconds"] = a.token_seconds;
  if (drafts) r["drafts"] = json_of(a.drafts);
  return r;
}

// The same report, with the new text and the stop string that ended it, which may be empty.
OrderedJson report_of(const std::string& text, const std::string& stop, const Answer& a, bool drafts) {
  OrderedJson r = {{"version", kAnswerVersion}, {"text", text}};
  r.update(report_of(a, drafts));
  if (!stop.empty()) r["stop"] = stop;
  return r;
}

// The text to continue, and its source.
struct Prompt {
  std::string text, from;
};
Prompt prompt_of(const GenerateCommand& o) {
  if (o.asked && !o.file.empty()) fail(ErrorCode::usage, "found --prompt and --file, expected one of them");
  const bool is_option = o.file.empty() && (o.asked || isatty(STDIN_FILENO) == 1);
  Prompt prompt = is_option ? Prompt{o.prompt, "--prompt"} : Prompt{read_input(o.file), input_name(o.file)};
  require_utf8(prompt.text, prompt.from);  // a chat format would count the bytes from the beginning of the turn
  return prompt;
}

// The files of a model; for a directory, all files in it.
std::vector<std::string> files_of(const std::string& model) {
  if (!is_directory(model)) return {model};
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(model)) files.push_back(entry.path());
  return files;
}

// Opens the model for a prompt; with --trace, the model records how the time of a token is spent.
OpenedModel open_for(const GenerateCommand& o, const std::string& path, int64_t context) {
  if (!o.trace.empty()) {
    refuse_to_replace(o.trace, {o.file, o.ids});
    refuse_to_replace(o.trace, files_of(path));
  }
  OpenedModel model = open_model(path, context + (o.trace.empty() ? 0 : 1), "the prompt and --tokens", o.on);
  if (!o.trace.empty() && !model.decoder->traces())
    fail(ErrorCode::unsupported, "--trace: found a model on ", model.decoder->device(),
         " whose tokens keep no times, expected GPT-OSS with experts in mxfp4 on Hopper GPUs");
  return model;
}
void write_trace(const GenerateCommand& o, Decoder& decoder) {
  constexpr int kOnly = 0;  // the only open slot
  if (!o.trace.empty()) write_file(o.trace, decoder.trace(kOnly));
}

// The ids of tokens that end a continuation: those of --stop-id and, without --past-end, the ids that end the model's
// documents.
std::vector<int32_t> stop_ids_of(const GenerateCommand& o, const OpenedModel& model) {
  std::vector<int32_t> ids = parse_stop_ids(o.stop_ids, model.decoder->vocab());
  if (!o.past_end) ids.insert(ids.end(), model.end_ids.begin(), model.end_ids.end());
  return ids;
}

// Prints one list of new ids for each list of the file.
void generate_ids(const GenerateCommand& o) {
  if (o.asked || !o.file.empty()) fail(ErrorCode::usage, "found --ids with --prompt or --file, expected one of them");
  const std::vector<std::vector<int32_t>> prompts = read_ids(o.ids);
  size_t longest = 0;
  for (const auto& p : prompts) longest = std::max(longest, p.size());
  const OpenedModel model = open_for(o, o.path, int64_t(longest) + o.tokens);
  check_ids(prompts, model.decoder->vocab(), o.ids);
  Session session(*model.decoder);
  Interrupt interrupt;
  SessionOptions options{.tokens = o.tokens, .sampling = o.sampling, .seed = o.seed};
  options.stop_ids = stop_ids_of(o, model);
  options.cancelled = [&] { return interrupt.asked(); };
  options.draft = draft_options(o.draft, *model.decoder);
  for (const auto& prompt : prompts) {
    session.forget();  // so that the ids of a line do not depend on earlier lines, to the last rounding
    const Answer answer = session.generate(prompt, options);
    std::vector<int32_t> ids = o.only_new || o.json ? std::vector<int32_t>() : prompt;
    ids.insert(ids.end(), answer.tokens.begin(), answer.tokens.end());
    write_out((o.json ? show_json(report_of(answer, o.draft.any())) : show_json(OrderedJson(ids))) + "\n");
    if (interrupt.asked()) fail(ErrorCode::interrupted, "stopped by a signal");
  }
  write_trace(o, *model.decoder);
}

// Ends the answer before the stop string, which the last part of its text contains.
void cut_at(ChatTurn& turn, const std::string& stop) {
  turn.answer.finish = Finish::stop;
  const auto text = std::find_if(turn.parts.rbegin(), turn.parts.rend(),
                                 [](const ChatPart& part) { return part.kind == ChatKind::text; });
  if (text == turn.parts.rend()) return;
  if (const size_t at = text->content.find(stop); at != std::string::npos) text->content.resize(at);
}

// Answers a prompt as the user's turn of a conversation.
void answer(const GenerateCommand& o, const std::string& path, const Vocabulary& v, const Prompt& prompt) {
  if (!v.chat)
    fail(ErrorCode::bad_data, o.conversation.tokenizer.empty() ? path : o.conversation.tokenizer, ": ",
         v.no_chat.empty()
             ? "found a tokenizer without the control tokens of a chat format (<|start|>, <|message|>, ...), "
               "expected one that has them, or --raw to continue the prompt as it is"
             : v.no_chat);
  if (!o.asked && o.file.empty() && isatty(STDIN_FILENO) == 1)
    fail(ErrorCode::usage, "found no prompt, expected --prompt TEXT or --file FILE; `ingot chat` holds a conversation");
  const ChatConversation opening = opening_of(o.conversation, *v.chat);
  ChatConversation asked = opening;
  asked.messages.push_back({.role = ChatRole::user, .content = prompt.text});
  const size_t length = about(prompt.from, [&] { return v.chat->prompt(asked).size(); });
  const OpenedModel model = open_for(o, path, int64_t(length) + std::max<int64_t>(1, o.tokens));
  Chat chat(*model.decoder, *v.chat, *v.tokenizer, opening);
  Interrupt interrupt;
  AnswerPrinter printer(false);
  SessionOptions options{.tokens = o.tokens, .sampling = o.sampling, .seed = o.seed};
  options.stop_ids = parse_stop_ids(o.stop_ids, model.decoder->vocab());
  options.cancelled = [&] { return interrupt.asked(); };
  options.draft = draft_options(o.draft, *model.decoder);
  StopStrings stops(o.stops);
  ChatPart latest{.kind = ChatKind::text};  // of the text that `stops` withholds
  options.on_token = [&](int32_t) { return !stops.found(); };
  ChatTurn turn = chat.say(prompt.text, options, [&](const ChatPart& part, std::string_view text) {
    const bool searched = part.kind == ChatKind::text;
    const std::string shown = searched ? stops.push(text) : std::string(text);
    if (searched) latest.label = part.label;
    if (!o.json && !shown.empty()) printer.show(part, shown);
  });
  if (const std::string rest = stops.finish(); !o.json && !rest.empty()) printer.show(latest, rest);
  if (stops.found()) cut_at(turn, stops.which());
  if (o.json)
    write_out(json_of(turn, o.draft.any()) + "\n");
  else
    printer.end();
  if (interrupt.asked()) fail(ErrorCode::interrupted, "stopped by a signal");
  write_trace(o, *model.decoder);
  const std::string ending = ending_line(turn, model.decoder->context(), o.tokens);
  log_info("[", speed_line(turn.answer, o.draft.any()), ending.empty() ? "" : "; ", ending, "]");
}

// Continues a prompt without the chat format.
void go_on(const GenerateCommand& o, const std::string& path, const Vocabulary& v, const Prompt& prompt) {
  std::vector<int32_t> ids = about(prompt.from, [&] { return v.tokenizer->encode(prompt.text); });
  if (v.start >= 0) ids.insert(ids.begin(), v.start);
  const OpenedModel model = open_for(o, path, int64_t(ids.size()) + o.tokens);
  Session session(*model.decoder);
  Interrupt interrupt;
  Utf8Stream stream;
  SessionOptions options{.tokens = o.tokens, .sampling = o.sampling, .seed = o.seed};
  options.stop_ids = stop_ids_of(o, model);
  options.cancelled = [&] { return interrupt.asked(); };
  options.draft = draft_options(o.draft, *model.decoder);
  std::string text;
  const auto show = [&](const std::string& piece) {
    if (!o.json) write_out(piece);
    text += piece;
  };
  options.vocab = std::min<int64_t>(model.decoder->vocab(), v.tokenizer->vocab_size());
  StopStrings stops(o.stops);
  options.on_token = [&](int32_t id) {  // control tokens stand for no text
    show(stops.push(stream.push(v.tokenizer->added_bytes(id))));
    return !stops.found();
  };
  if (!o.only_new && !o.json) write_out(prompt.text);
  Answer answer = session.generate(ids, options);
  show(stops.push(stream.finish()));
  show(stops.finish());
  if (stops.found()) answer.finish = Finish::stop;
  if (o.json)
    write_out(show_json(report_of(text, stops.which(), answer, o.draft.any())) + "\n");
  else if (!(text.empty() ? prompt.text : text).ends_with('\n'))
    write_out("\n");
  if (interrupt.asked()) fail(ErrorCode::interrupted, "stopped by a signal");
  write_trace(o, *model.decoder);
}

// Continues a prompt with a run of `ingot train`: the start token comes first, and the text may exceed the context.
void go_on_in_documents(const GenerateCommand& o, const std::string& path, const Prompt& prompt) {
  // The model, adapted to the prompt or unchanged; both outlive the decoder.
  std::unique_ptr<TrainedModel> trained;
  Adapted adapted;
  OpenedModel model;
  if (o.ttt.on) {
    trained = std::make_unique<TrainedModel>(load_trained(path));
    const TrainedModel& t = *trained;
    const Device device = training_device(t.config, o.on.device);
    adapted = adapt(o.ttt, t, device, prompt.text, prompt.from);
    const GptAdapters adapters = adapted.adapters->values(0, 1);
    model.decoder = device.kind == Device::cuda
                        ? make_device_decoder(t.config, t.weights, t.looping, device, 1, &adapters)
                        : make_decoder(t.config, t.weights, t.looping, t.products, 1, &adapters);
  } else {
    model = open_model(path, 0, "", o.on);
  }
  const Vocabulary v = load_vocabulary(path);
  if (prompt.text.empty() && v.tokenizer->bos() < 0)
    fail(ErrorCode::usage, prompt.from, ": found an empty prompt, and the tokenizer of ", path,
         " has no start token; expected some text");
  const std::vector<int32_t> stop_ids = parse_stop_ids(o.stop_ids, model.decoder->vocab());
  Generator generator(std::move(model.decoder));
  Interrupt interrupt;
  Continuation c;
  c.prompt = prompt.text, c.from = prompt.from;
  c.options = {.tokens = o.tokens,
               .sampling = o.sampling,
               .seed = o.seed,
               .stop_at_document_end = !o.past_end,
               .stop_ids = stop_ids};
  if (!o.json) c.show = [](std::string_view piece) { write_out(piece); };
  c.stop = [&] { return interrupt.asked(); };
  c.repeat_prompt = !o.only_new;
  c.stops = o.stops;
  const Continued made = continue_text(generator, *v.tokenizer, c);
  if (o.json)
    write_out(show_json(report_of(made.text, made.stop, made.answer, false)) + "\n");
  else if (made.text.empty() || made.text.back() != '\n')
    write_out("\n");
  if (interrupt.asked()) fail(ErrorCode::interrupted, "stopped by a signal");
}

void generate(const GenerateCommand& o, const Command& c) {
  if (!o.ids.empty()) return generate_ids(o);
  const Prompt prompt = prompt_of(o);
  if (!chats(o.path)) return go_on_in_documents(o, o.path, prompt);
  const Vocabulary v = load_vocabulary(o.path, vocabulary_options(o.conversation));
  if (o.raw) return go_on(o, o.path, v, prompt);
  if (v.chat) refuse_unused(c, *v.chat, o.conversation.date);
  answer(o, o.path, v, prompt);
}

}  // namespace

void add_generate(Command& root) {
  Command& c = root.add("generate", "Continues a prompt with a model");
  auto o = std::make_shared<GenerateCommand>();
  add_model(c, o->run, o->model);
  add_synthetic(c, o->synthetic);
  const Option& prompt = c.text("--prompt TEXT", o->prompt,
                                "the text to continue, or the question (default: standard input; on a terminal a run "
                                "of `ingot train` begins a new text)")
                             .allow_empty();
  c.text("--file FILE", o->file, "a file with the text to continue");
  c.text("--ids FILE", o->ids,
         "in place of text: a file (-: standard input) with one JSON list of token ids per line; prints such lists");
  c.integer("--tokens N", o->tokens, 0, 1 << 30, "generate at most N tokens (default: 200)");
  add_options(c, o->sampling);
  c.unsigned_integer("--seed N", o->seed, "the same seed gives the same text (default: 1)");
  add_stop_ids(c, o->stop_ids);
  c.list("--stop TEXT", o->stops, "the text ends before TEXT, which may span several tokens; may be repeated")
      .allow_empty();
  c.flag("--only-new", o->only_new, "do not repeat the prompt");
  add_options(c, o->on);
  add_gpu_options(c, o->on);
  add_options(c, o->draft);
  c.text("--adapters FILE", o->on.adapters, "adapters of `ingot ttt`, for a run of `ingot train`");
  c.flag("--ttt", o->ttt.on, "train adapters on the prompt first (for a run of `ingot train`)");
  add_constants(c, o->ttt);
  add_options(c, o->conversation);
  c.text("--trace FILE", o->trace,
         "after an answer of GPT-OSS on a GPU, write the times of a token's stages, for ui.perfetto.dev");
  c.flag("--raw", o->raw, "continue the prompt as plain text, not as a user's turn in the model's chat format");
  c.flag("--json", o->json,
         "print one JSON object: the new text and ids, the reason for the end, the times; with --ids one per line");
  c.flag("--past-end", o->past_end, "continue after the model has ended its document");
  c.examples(R"(  ingot generate runs/a --prompt "ROMEO:" --tokens 200 --temperature 0.8 --seed 1
  echo -n "template <class T>" | ingot generate runs/a --top-p 0.9
  ingot generate runs/a --prompt "The" --temperature 0
  ingot generate --model gpt-oss-20b --prompt "What is 2 + 2?" --reasoning low
  ingot generate --model gpt-oss-20b --ids prompts.jsonl --tokens 32 --temperature 0 --json)");
  c.run([o, &c, &prompt] {
    o->asked = prompt.given || !o->prompt.empty();
    if (!o->ids.empty())
      c.refuse_given({"reasoning", "system", "developer", "date", "tokenizer", "chat-format", "raw", "stop"}, "--ids");
    else if (o->raw)
      c.refuse_given({"reasoning", "system", "developer", "date"}, "--raw");
    if (std::find(o->stops.begin(), o->stops.end(), "") != o->stops.end())
      fail(ErrorCode::usage, "--stop: found an empty text, expected one of at least a character");
    refuse_split_of_one(c, o->on.gpus);
    choose_draft_head(c, o->draft, o->on);
    if (o->json) c.refuse_given({"only-new"}, "--json, which holds only what is new");
    const std::string path = o->path = chosen_model(o->run, o->model, o->synthetic);
    o->on.dense = dense_at_loading(o->synthetic);
    if (exists(path) && !chats(path))
      c.refuse_given(
          {"reasoning", "system", "developer", "date", "tokenizer", "chat-format", "raw", "trace", "whole-head",
           "draft", "draft-max", "draft-costs", "draft-layers", "draft-window", "draft-dense", "draft-exact", "dense"},
          "a run of `ingot train`");
    else if (o->ids.empty() && !o->raw && chats(path))
      c.refuse_given({"only-new", "past-end"}, "a question to a model that chats (--raw goes on with a text)");
    if (!o->ttt.on)
      c.refuse_given({"ttt-chunk", "ttt-window", "ttt-rank", "ttt-lr", "ttt-beta2", "ttt-eps", "ttt-decay"},
                     "an answer without --ttt");
    if (!o->ids.empty() && o->ttt.on) c.refuse_given({"ttt"}, "--ids");
    if (chats(path)) c.refuse_given({"adapters", "ttt"}, "a published model");
    o->ttt.adapters = o->on.adapters;
    generate(*o, c);
  });
}

}  // namespace ingot::cli
