#include "engine.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <mutex>

#include "ingot/core/check.h"
#include "ingot/engines/generate/chat.h"
#include "ingot/engines/serve/api_request.h"
#include "ingot/io/checkpoint.h"
#include "ingot/io/file.h"
#include "ingot/models/registry.h"
#include "ingot/text/chat/templates.h"
#include "ingot/text/utf8.h"

namespace ingot::python {
namespace nb = nanobind;
using namespace nb::literals;

namespace {

// A caller's function, called with the interpreter's lock. An exception of the function ends the answer and is raised
// in the caller, as is the exception of a signal handler of Python.
class Listener {
 public:
  explicit Listener(nb::object function) : function_(std::move(function)) {}
  void hear(const std::string& channel, std::string_view text) {
    if (function_.is_none() || text.empty()) return;
    guarded([&] {
      const nb::object go_on = function_(channel, std::string(text));
      if (go_on.ptr() == Py_False) stopped_ = true;
    });
  }
  bool asked() {
    guarded([] {
      if (PyErr_CheckSignals() != 0) throw nb::python_error();
    });
    return stopped_;
  }
  // Called with the interpreter's lock held.
  void raise_what_was_raised() {
    if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  template <class Call> void guarded(Call&& call) {
    const nb::gil_scoped_acquire locked;
    try {
      call();
    } catch (...) {
      if (!error_) error_ = std::current_exception();
      stopped_ = true;
    }
  }
  const nb::object function_;
  bool stopped_ = false;
  std::exception_ptr error_;
};

SessionOptions options_of(int64_t tokens, double temperature, int64_t top_k, double top_p, double min_p, uint64_t seed,
                          int64_t logprobs, Listener& listener) {
  SessionOptions o{.tokens = tokens,
                   .sampling = {.temperature = temperature, .top_k = top_k, .top_p = top_p, .min_p = min_p},
                   .seed = seed,
                   .logprobs = logprobs};
  o.cancelled = [&listener] { return listener.asked(); };
  return o;
}

nb::dict report_of(const Answer& a) {
  nb::list logprobs;
  for (const TokenLogprobs& t : a.logprobs) {
    nb::list top;
    for (const TokenLogprob& l : t.top) top.append(nb::make_tuple(l.id, l.logprob));
    logprobs.append(nb::make_tuple(t.sampled, top));
  }
  nb::dict d;
  d["ids"] = a.tokens;
  d["finish"] = name_of(a.finish);
  d["stop_id"] = a.stop_id;
  d["prompt_tokens"] = a.prompt;
  d["reused_tokens"] = a.reused;
  d["prompt_seconds"] = a.prompt_seconds;
  d["token_seconds"] = a.token_seconds;
  d["drafted_tokens"] = a.drafts.tokens;
  d["accepted_tokens"] = a.drafts.accepted;
  d["logprobs"] = logprobs;
  return d;
}

// The conversation of `request`, a JSON object with the fields messages, tools and tool_choice of OpenAI's chat
// completions, read as `ingot serve` reads a request. Python's name of the messages is `prompt`.
ChatConversation conversation_in(const std::string& request) {
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();  // the limits of a server protect it from its clients
  try {
    return conversation_of(parse_api_request(request, true, {.body = kAny, .tools = kAny, .strict_fields = true}));
  } catch (const ApiError& e) {
    std::string what = e.what();
    constexpr std::string_view kMessages = "messages";
    if (what.starts_with(kMessages)) what.replace(0, kMessages.size(), "prompt");
    fail(ErrorCode::invalid_argument, "engine: ", what);
  }
}

// Names the engine in errors of a format or a session that a call's arguments cause.
template <class Work> auto named(Work&& work) {
  try {
    return work();
  } catch (const Error& e) {
    if (e.code != ErrorCode::usage) throw;
    fail(ErrorCode::usage, "engine: ", e.what());
  }
}

// The channel of a part, where a format has no name of its own for thoughts and calls.
std::string channel_of(const ChatPart& p) {
  if (!p.label.empty()) return p.label;
  return p.kind == ChatKind::thought ? "analysis" : p.kind == ChatKind::call ? "commentary" : "";
}
void add_parts(const std::vector<ChatPart>& parts, nb::dict& to) {
  nb::list messages, calls;
  for (const ChatPart& p : parts) {
    messages.append(nb::make_tuple(channel_of(p), p.name, p.content));
    if (p.kind == ChatKind::call) calls.append(nb::make_tuple(p.id, p.name, p.content, channel_of(p)));
  }
  to["messages"] = messages;
  to["calls"] = calls;
}

// An error's text with the engine's arguments in place of the program's options.
std::string in_python(std::string text) {
  constexpr std::pair<std::string_view, std::string_view> kNames[] = {{"--chat-format NAME", "chat_format=NAME"},
                                                                      {"`ingot generate --raw`", "raw=True"},
                                                                      {", or --tokenizer FILE", ", or tokenizer=FILE"},
                                                                      {"--draft-layers: found", "draft_layers: found"},
                                                                      {"--draft: ", "draft: "},
                                                                      {"--dense: found", "dense: found"},
                                                                      {"--dense fp8", "dense=\"fp8\""},
                                                                      {"--draft on a GPU: ", "draft on a GPU: "}};
  for (const auto& [option, argument] : kNames)
    if (const size_t at = text.find(option); at != std::string::npos) text.replace(at, option.size(), argument);
  return text;
}
template <class Open> auto opened_for_python(Open&& open) {
  try {
    return open();
  } catch (const Error& e) { fail(e.code, in_python(e.what())); }
}

// The path of a model. A directory may be a run, whose first file to be read would be the tokenizer: one without a
// checkpoint is refused by that reason.
const std::string& with_checkpoint(const std::string& path) {
  if (!model_kind_of(path).chats && is_directory(path)) open_checkpoint(path);
  return path;
}

// A model and a sequence: the common tokens of the sequence and the next prompt are reused.
class Engine {
  // Runs `work` without the interpreter's lock; only one call runs at a time.
  template <class Work> auto unlocked(Work&& work) {
    nb::gil_scoped_release released;
    const std::unique_lock<std::mutex> alone(busy_, std::try_to_lock);
    if (!alone.owns_lock()) fail(ErrorCode::busy, "engine: found an answer under way, expected one at a time");
    return work();
  }

 public:
  Engine(const std::string& path, const std::string& tokenizer, const std::string& chat_format,
         const std::string& device, int64_t context, bool quant, const std::string& dense, const std::string& draft,
         int64_t draft_max, const std::vector<double>& draft_costs, const std::vector<int64_t>& draft_layers,
         int64_t draft_window, const std::string& draft_dense, bool draft_exact)
      : vocabulary_(opened_for_python([&] {
          return load_vocabulary(with_checkpoint(path), {.tokenizer = tokenizer, .chat_format = chat_format});
        })),
        model_(opened_for_python([&] {
          return open_model(path, {.context = context,
                                   .device = device_named(device),
                                   .e4m3_experts = quant,
                                   .draft_head = draft == "none" || draft == "lookup" ? "" : draft,
                                   .draft_layers = draft_layers,
                                   .draft_window = draft_window,
                                   .draft_dense = draft_dense,
                                   .dense = dense});
        })),
        session_(*model_.decoder) {
    draft_.most = draft_max, draft_.exact = draft_exact, draft_.step_costs = draft_costs;
    if (draft == "none") return;
    if (model_.decoder->draft_rows() <= 1)
      fail(ErrorCode::unsupported, "engine: draft: found a model on ", model_.decoder->device(),
           " whose engine computes no drafts, expected a published model, on a GPU one with at least 163 KB of shared "
           "memory per block");
    draft_.make = draft::make_lookup;
  }

  // A text with a character that the tokenizer lacks is a wrong argument.
  std::vector<int32_t> encode(const std::string& text) const {
    try {
      return vocabulary_.tokenizer->encode(text);
    } catch (const Error& e) { fail(ErrorCode::invalid_argument, "engine: ", e.what()); }
  }
  nb::bytes decode(const std::vector<int32_t>& ids) const {
    const std::string bytes = vocabulary_.tokenizer->decode(ids);
    return nb::bytes(bytes.data(), bytes.size());
  }
  nb::dict about() const {
    const Decoder& d = *model_.decoder;
    nb::dict out;
    out["device"] = d.device().kind == Device::cuda ? "cuda" : "cpu";
    out["context"] = d.context();
    out["vocab"] = d.vocab();
    out["weight_bytes"] = model_.weight_bytes;
    out["load_seconds"] = model_.load_seconds;
    out["harmony"] = vocabulary_.chat != nullptr;  // whether the model has a chat format
    std::vector<std::string> efforts;
    if (vocabulary_.chat) efforts = vocabulary_.chat->efforts();
    out["efforts"] = nb::tuple(nb::cast(efforts));
    out["start"] = vocabulary_.start >= 0 ? nb::object(nb::int_(vocabulary_.start)) : nb::none();
    out["note"] = in_python(model_.note);
    return out;
  }

  // Continues `prompt` without a chat format. on_text("", text) may return False to end the answer.
  nb::dict go_on(const std::vector<int32_t>& prompt, int64_t tokens, double temperature, int64_t top_k, double top_p,
                 double min_p, uint64_t seed, int64_t logprobs, bool past_end, nb::object on_text) {
    Listener listener(std::move(on_text));
    SessionOptions o = options_of(tokens, temperature, top_k, top_p, min_p, seed, logprobs, listener);
    o.draft = draft_;
    if (!past_end) o.stop_ids = model_.end_ids;
    o.vocab = std::min<int64_t>(model_.decoder->vocab(), vocabulary_.tokenizer->vocab_size());
    Utf8Stream stream;
    std::string text;
    const auto say = [&](const std::string& piece) {
      text += piece;
      listener.hear("", piece);
    };
    o.on_token = [&](int32_t id) {  // control tokens have no text
      say(stream.push(vocabulary_.tokenizer->added_bytes(id)));
      return true;
    };
    const Answer answer = unlocked([&] {
      for (size_t i = 0; i < prompt.size(); ++i)
        if (prompt[i] < 0 || prompt[i] >= model_.decoder->vocab())
          fail(ErrorCode::invalid_argument, "engine: prompt: found id ", prompt[i], " at place ", i, ", expected 0 to ",
               model_.decoder->vocab() - 1);
      Answer a = session_.generate(prompt, o);
      say(stream.finish());
      return a;
    });
    listener.raise_what_was_raised();
    nb::dict d = report_of(answer);
    d["text"] = text;
    return d;
  }

  // The answer to the conversation of a request. on_text(channel, text) as above; the arguments of a call are never in
  // a channel whose text is the answer.
  nb::dict answer(const std::string& request, const std::string& identity, const std::string& reasoning,
                  const std::string& date, int64_t tokens, double temperature, int64_t top_k, double top_p,
                  double min_p, uint64_t seed, int64_t logprobs, nb::object on_text) {
    const ChatConversation asked = conversation(request, identity, reasoning, date);
    Listener listener(std::move(on_text));
    SessionOptions o = options_of(tokens, temperature, top_k, top_p, min_p, seed, logprobs, listener);
    o.draft = draft_;
    const ShowChat show = [&](const ChatPart& part, std::string_view text) {
      listener.hear(part.kind == ChatKind::call ? "commentary" : channel_of(part), text);
    };
    const ChatTurn turn = unlocked([&] {
      return named([&] { return ingot::answer(session_, *vocabulary_.chat, *vocabulary_.tokenizer, asked, o, show); });
    });
    listener.raise_what_was_raised();
    nb::dict d = report_of(turn.answer);
    add_parts(turn.parts, d);
    return d;
  }
  // The ids of the prompt that answer() computes.
  std::vector<int32_t> prompt(const std::string& request, const std::string& identity, const std::string& reasoning,
                              const std::string& date) const {
    const ChatConversation asked = conversation(request, identity, reasoning, date);
    return named([&] { return vocabulary_.chat->prompt(asked); });
  }
  // The messages and calls of an answer to a request, given by its ids up to the id that ends the answer.
  nb::dict parse(const std::vector<int32_t>& ids, const std::string& request) const {
    std::vector<std::string> functions;
    for (const ChatFunction& f : conversation(request, "", "", "").functions) functions.push_back(f.name);
    const std::vector<int32_t> ends = vocabulary_.chat->stop_ids();
    ChatAnswer said(*vocabulary_.chat, {}, std::move(functions));
    Answer whole;
    for (const int32_t id : ids) {
      if (std::find(ends.begin(), ends.end(), id) != ends.end()) whole.stop_id = id, whole.finish = Finish::stop;
      if (whole.stop_id >= 0 || !said.push(id)) break;
      whole.tokens.push_back(id);
    }
    const ChatTurn turn = said.finish(std::move(whole));
    nb::dict d = report_of(turn.answer);
    add_parts(turn.parts, d);
    return d;
  }

 private:
  ChatConversation conversation(const std::string& request, const std::string& identity, const std::string& reasoning,
                                const std::string& date) const {
    if (!vocabulary_.chat)
      fail(
          ErrorCode::unsupported, "engine: ",
          vocabulary_.no_chat.empty()
              ? "found a tokenizer without the control tokens of a chat format (<|start|>, <|message|>, ...), expected "
                "one that has them, or raw=True"
              : in_python(vocabulary_.no_chat));
    ChatConversation asked = conversation_in(request);
    asked.identity = identity;
    asked.date = date;
    asked.effort = nearest_effort(*vocabulary_.chat, reasoning);
    return asked;
  }
  const Vocabulary vocabulary_;
  OpenedModel model_;
  Session session_;
  draft::Options draft_;
  std::mutex busy_;
};

}  // namespace

void define_engine(nb::module_& m) {
  m.def("chat_formats", &chat_format_names);
  m.def("chat_efforts", &chat_efforts);
  nb::class_<Engine>(m, "Engine")
      .def(nb::init<const std::string&, const std::string&, const std::string&, const std::string&, int64_t, bool,
                    const std::string&, const std::string&, int64_t, const std::vector<double>&,
                    const std::vector<int64_t>&, int64_t, const std::string&, bool>(),
           "path"_a, "tokenizer"_a, "chat_format"_a, "device"_a, "context"_a, "quant"_a, "dense"_a, "draft"_a,
           "draft_max"_a, "draft_costs"_a, "draft_layers"_a, "draft_window"_a, "draft_dense"_a, "draft_exact"_a,
           nb::call_guard<nb::gil_scoped_release>())
      .def("encode", &Engine::encode)
      .def("decode", &Engine::decode)
      .def("about", &Engine::about)
      .def("go_on", &Engine::go_on, "prompt"_a, "tokens"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seed"_a,
           "logprobs"_a, "past_end"_a, "on_text"_a.none())
      .def("prompt", &Engine::prompt, "request"_a, "identity"_a, "reasoning"_a, "date"_a)
      .def("parse", &Engine::parse, "ids"_a, "request"_a)
      .def("answer", &Engine::answer, "request"_a, "identity"_a, "reasoning"_a, "date"_a, "tokens"_a, "temperature"_a,
           "top_k"_a, "top_p"_a, "min_p"_a, "seed"_a, "logprobs"_a, "on_text"_a.none());
}

}  // namespace ingot::python
