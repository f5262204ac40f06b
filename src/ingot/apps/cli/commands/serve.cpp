// ingot serve: serves a model through OpenAI's and Anthropic's APIs.
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <optional>
#include <thread>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/framework/interrupt.h"
#include "ingot/apps/cli/shared/conversation.h"
#include "ingot/apps/cli/shared/models.h"
#include "ingot/apps/cli/shared/server_process.h"
#include "ingot/core/log.h"
#include "ingot/core/version.h"
#include "ingot/io/checkpoint.h"
#include "ingot/io/file.h"
#ifdef INGOT_HAS_MICROHTTPD
#include "ingot/apps/server/server.h"
#endif

namespace ingot::cli {
namespace {

struct ServeCommand {
  std::string run, model, name, tokenizer, chat_format, key_file, reasoning = "medium", date = "today";
  std::string host = "127.0.0.1";
  std::vector<std::string> hosts, origins;
  SyntheticOptions synthetic;
  DecoderOptions on;
  DraftCommand draft = {.how = "prediction"};
  int64_t port = 8080, context = 0, slots = 0, waiting = 64, connections = 256, connections_of_one = 0;
  double drain = 30, patience = 30;
  bool insecure = false, strict_fields = false;
};

#ifdef INGOT_HAS_MICROHTTPD
bool is_loopback(const std::string& host) { return host == "localhost" || host == "::1" || host.starts_with("127."); }

// An origin is a scheme and a host. "null", which any sandboxed page may send, identifies no page.
void check_origins(const std::vector<std::string>& origins) {
  for (const std::string& origin : origins) {
    const size_t scheme_end = origin.find("://");
    const bool is_one = scheme_end != std::string::npos && scheme_end > 0 && scheme_end + 3 < origin.size() &&
                        origin.find_first_of("/?#@ *", scheme_end + 3) == std::string::npos;
    if (!is_one)
      fail(ErrorCode::usage, "--cors-origin: found '", origin,
           "', expected a scheme and a host alone, such as https://a.example");
  }
}

server::ServerOptions server_options(const ServeCommand& o) {
  check_origins(o.origins);
  server::ServerOptions s{
      .host = o.host, .port = int(o.port), .keys = read_keys(o.key_file), .hosts = o.hosts, .origins = o.origins};
  s.limits.strict_fields = o.strict_fields;
  s.connections = int(o.connections);
  s.connections_of_one = int(o.connections_of_one);
  s.header_seconds = s.body_seconds = s.stall_seconds = o.patience;
  if (!is_loopback(o.host)) {
    if (s.keys.empty() && !o.insecure)
      fail(ErrorCode::usage, "--host: found ", o.host,
           " without --api-key-file: every machine that reaches this one could send requests; --insecure allows this");
  } else {
    // On a loopback address only these host names are allowed: another site could make its own name point to this
    // address, and its pages would then have the server's origin.
    for (const char* name : {"localhost", "127.0.0.1", "::1"}) s.hosts.push_back(name);
    s.hosts.push_back(o.host);
  }
  return s;
}

DraftWhich which_drafted(const DraftCommand& o) {
  return o.how == "none" ? DraftWhich::none : o.how == "prediction" ? DraftWhich::predicted : DraftWhich::all;
}

// If a directory has neither a tokenizer nor a model, the error says that it has no model.
Vocabulary vocabulary_of(const ServeCommand& o, const std::string& path) {
  try {
    return load_vocabulary(path, {.tokenizer = o.tokenizer, .chat_format = o.chat_format});
  } catch (const Error& e) {
    if (e.code == ErrorCode::not_found && is_directory(path) && !chats(path)) open_checkpoint(path);
    throw;
  }
}

void serve(const ServeCommand& o, const std::string& path, const Command& c) {
  if (std::any_of(o.name.begin(), o.name.end(), [](unsigned char c) { return c < ' ' || c == 127; }))
    fail(ErrorCode::usage, "--name: found a name with control characters, expected one line of text");
  if (o.date != "today" && o.date != "none") check_date(o.date);
  // Before the model is loaded, so that a port in use is found at once.
  std::optional<server::Server> listening;
  try {
    listening.emplace(server_options(o));
  } catch (const Error& e) {
    if (e.code != ErrorCode::busy) throw;
    fail(e.code, e.what(), "; --port chooses another, and --port 0 any free one");
  }
  server::Server& server = *listening;
  Vocabulary vocabulary = vocabulary_of(o, path);
  if (vocabulary.chat) refuse_unused(c, *vocabulary.chat, o.date);
  if (!vocabulary.no_chat.empty())
    log_warn(o.tokenizer.empty() ? path : o.tokenizer, ": ", vocabulary.no_chat,
             "; only completions of text are served");
  DecoderOptions on = o.on;
  on.slots = o.slots, on.fit_slots = true;
  OpenedModel model = open_model(path, o.context, "--context", on);
  // From here on the first signal lets answers finish. Before, a signal ends the program at once, because loading may
  // take minutes.
  Interrupt interrupt;
  const DraftWhich drafted = which_drafted(o.draft);
  if (drafted == DraftWhich::all) require_drafts(*model.decoder);
  const int64_t slots = model.decoder->slots(), context = model.decoder->context();
  std::string name = o.name;
  if (name.empty()) name = std::filesystem::path(path).lexically_normal().filename().string();
  if (name.empty()) name = "model";
  Service service(std::move(model), std::move(vocabulary),
                  {.name = name,
                   .reasoning = o.reasoning,
                   .date = o.date == "none" ? "" : o.date,
                   .version = version(),
                   .scheduling = {.waiting = o.waiting, .drafted = drafted, .draft = lookup_options(o.draft)}});
  server.serve(service);
  const std::string address = o.host.find(':') == std::string::npos ? o.host : "[" + o.host + "]";
  log_info("serving ", name, " at http://", address, ":", server.port(),
           " (a page for the browser; OpenAI's base URL is this address with /v1); Ctrl-C ends it");
  log_info("up to ", slots, slots == 1 ? " request" : " requests", " at a time, each of up to ", context,
           " tokens with its answer");
  while (!interrupt.asked()) std::this_thread::sleep_for(std::chrono::milliseconds(50));
  log_info("finishing the answers under way, for at most ", fixed(o.drain, 0), " s");
  if (!server.stop(o.drain)) log_warn("some answers were cut off");
}
#else
void serve(const ServeCommand&, const std::string&, const Command&) {
  fail(ErrorCode::unsupported,
       "found a build without libmicrohttpd, expected one made where the package libmicrohttpd-dev is installed");
}
#endif

}  // namespace

void add_serve(Command& root) {
  Command& c = root.add("serve", "Serves a model over HTTP with OpenAI's and Anthropic's APIs");
  auto o = std::make_shared<ServeCommand>();
  add_model(c, o->run, o->model);
  add_synthetic(c, o->synthetic);
  c.text("--name NAME", o->name, "the model's name in the API (default: the last part of the path)");
  c.text("--host ADDRESS", o->host, "address to listen on (default: 127.0.0.1, for clients on this machine only)");
  c.integer("--port N", o->port, 0, 65535, "port to listen on; 0: any free port (default: 8080)");
  c.text("--api-key-file FILE", o->key_file, "a file with one key per line; a client must send one of the keys");
  c.flag("--insecure", o->insecure, "accept clients of other machines without keys");
  c.list("--allow-host NAME", o->hosts, "a further host name of this server; may be repeated");
  c.list("--cors-origin ORIGIN", o->origins,
         "an origin whose pages may send requests, such as https://a.example; may be repeated");
  c.flag("--strict-fields", o->strict_fields,
         "refuse requests with unknown fields or with tools other than functions (default: ignore these, and log each "
         "once)");
  c.integer("--slots N", o->slots, 0, kMostSlots,
            "most requests that are answered at a time; 0: as many as fit into the GPU's memory, at most 128, or 4 on "
            "a CPU (default: 0)");
  o->on.batched_sequences = true;
  c.flag("--one-by-one", o->on.batched_sequences,
         "on a GPU, compute each sequence of a published model by itself: fewer tokens per second in total, but the "
         "answer to a seed does not depend on other requests (default: sequences share passes over the weights)")
      .negated();
  c.integer("--queue N", o->waiting, 0, 1 << 20,
            "most requests that wait for a slot; further requests get status 429 (default: 64)");
  c.integer(
      "--context N", o->context, 0, 1 << 30,
      "most tokens of a request and its answer; 0: on a GPU, the longest context, down to 8192, for which --slots or "
      "64 slots fit into its memory, and down to 1024 where otherwise not all of --slots or not even one slot "
      "would fit; on a CPU 8192 or the model's context (default: 0)");
  c.integer("--connections N", o->connections, 1, kMostConnections, "most connections at a time (default: 256)");
  c.integer("--connections-of-one N", o->connections_of_one, 0, kMostConnections,
            "most connections at a time from one address; 0: no limit per address (default: 0)");
  c.number(
      "--patience SECONDS", o->patience, 0.1, 3600,
      "longest wait for a request's whole header, for its body, and for a client that reads nothing (default: 30)");
  c.number("--drain SECONDS", o->drain, 0, 3600,
           "after a signal to end, longest wait for the answers under way (default: 30)");
  c.text("--tokenizer FILE", o->tokenizer,
         "a tokenizer.json or .tiktoken of the model's vocabulary (default: the file beside the model)");
  add_chat_format(c, o->chat_format);
  c.choice("--reasoning EFFORT", o->reasoning, {"none", "low", "medium", "high"},
           "level of a request that specifies none: none, low, medium or high (default: medium)");
  c.text("--date DATE", o->date, "the date in the system message, or none (default: today)");
  add_options(c, o->on);
  add_gpu_options(c, o->on);
  add_draft_options(
      c, o->draft,
      "which answers have drafts, so that a step may yield several tokens of an answer: none; prediction: the answers "
      "to requests with a prediction; lookup: all answers, by guesses from earlier places of the same text; or the "
      "directory of a published EAGLE-3 head: all answers, also by guesses of the head (default: prediction)");
  c.examples(R"(  ingot serve --model gpt-oss-20b
  ingot serve runs/a --port 9000
  ingot serve --synthetic 20b --slots 16
  ingot serve --model gpt-oss-20b --host 0.0.0.0 --api-key-file keys.txt --allow-host chat.example
  curl http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' -d '{"prompt": "Once"}')");
  c.run([o, &c] {
    refuse_split_of_one(c, o->on.gpus);
    const std::string path = chosen_model(o->run, o->model, o->synthetic);
    o->on.dense = dense_at_loading(o->synthetic);
    if (exists(path) && !chats(path))
      c.refuse_given({"reasoning", "date", "one-by-one", "whole-head", "draft", "draft-max", "draft-costs",
                      "draft-layers", "draft-window", "draft-dense", "draft-exact", "dense"},
                     "a run of `ingot train`");
    choose_draft_head(c, o->draft, o->on, {"none", "prediction", "lookup"});
    serve(*o, path, c);
  });
}

}  // namespace ingot::cli
