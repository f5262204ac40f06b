// ingot bench serve: the speed that clients of a server measure. The command starts a server, or measures a running
// server with OpenAI's API.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <optional>
#include <sstream>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/measure/serve_load.h"
#include "ingot/apps/cli/shared/conversation.h"
#include "ingot/apps/cli/shared/models.h"
#include "ingot/apps/cli/shared/server_process.h"
#include "ingot/core/log.h"
#include "ingot/core/version.h"
#include "ingot/io/json.h"

namespace ingot::cli {
namespace {

// The most waiting requests and connections of a server by default.
constexpr int64_t kQueue = 64, kConnections = 256;
constexpr int64_t kSlotsOfRates = 16;  // of a server that is measured at rates of requests

struct BenchServe {
  std::string run, model, url, key_file, server_options;
  SyntheticOptions synthetic;
  std::string concurrency = "1,2,4,8,16,32,64", rates;
  std::string prompt = "500", answer = "200";
  int64_t requests = 0, warm_up = 1, vocab = 0;
  uint64_t seed = 1;
  ServeLoad load;
  bool json = false;
};

LengthRange range_of(const char* option, const std::string& text) {
  LengthRange r;
  char* end = nullptr;
  r.least = r.most = std::strtoll(text.c_str(), &end, 10);
  if (*end == '-') r.most = std::strtoll(end + 1, &end, 10);
  if (text.empty() || *end != 0 || r.least < 1 || r.most < r.least || r.most > 1 << 24)
    fail(ErrorCode::usage, option, ": found '", text, "', expected a number of tokens or a range like 100-2000");
  return r;
}
std::vector<double> rates_of(const std::string& list) {
  std::vector<double> rates;
  std::istringstream in(list);
  for (std::string word; std::getline(in, word, ',');) {
    char* end = nullptr;
    rates.push_back(std::strtod(word.c_str(), &end));
    if (word.empty() || *end != 0 || !(rates.back() > 0) || std::isinf(rates.back()))
      fail(ErrorCode::usage, "--rate: found '", list, "', expected numbers of requests a second like 0.5,2,8");
  }
  return rates;
}

int64_t requests_of_rate(const BenchServe& o) { return o.requests > 0 ? o.requests : 64; }

// The command line of `ingot serve`. There is a connection for each of `clients`, and for each client's request one of
// `slots` slots or a place in the queue.
std::vector<std::string> server_words(const BenchServe& o, const std::string& model, int64_t slots, int64_t clients) {
  std::vector<std::string> words = {"--model", model};
  std::istringstream in(o.server_options);
  std::string given;
  for (std::string word; in >> word;) {
    given += word.substr(0, word.find('=')) + " ";
    words.push_back(word);
  }
  if (const std::string dense = dense_at_loading(o.synthetic); !dense.empty())
    words.insert(words.end(), {"--dense", dense});
  const auto add = [&](const std::string& option, int64_t value) {
    if (given.find(option + " ") == std::string::npos) words.insert(words.end(), {option, std::to_string(value)});
  };
  add("--slots", std::min(slots, kMostSlots));
  if (clients > kQueue) add("--queue", clients);
  // One more connection, over which this command asks for the model's description.
  if (clients + 1 > kConnections) add("--connections", std::min(clients + 1, kMostConnections));
  return words;
}

std::string shown_ms(double ms) { return fixed(ms, ms < 10 ? 2 : ms < 100 ? 1 : 0); }
void print_columns(const std::vector<std::string>& texts) {
  constexpr size_t kWidths[] = {10, 8, 6, 8, 10, 15, 7, 18, 7};
  std::string line;
  for (size_t i = 0; i < texts.size(); ++i)
    line += std::string(i > 0 ? 2 : 0, ' ') + std::string(kWidths[i] - std::min(kWidths[i], texts[i].size()), ' ') +
            texts[i];
  write_out(line + "\n");
}
void print_serve_head(bool rates) {
  print_columns({rates ? "requests/s" : "at once", "requests", "errors", "tokens/s", "ms a token", "first token p50",
                 "p99 ms", "between tokens p50", "p99 ms"});
}
void print_row(const ServeTimes& t) {
  const bool answered = t.errors < t.requests;
  const auto ms = [&](double x) { return answered ? shown_ms(x) : "-"; };
  print_columns({t.clients > 0 ? std::to_string(t.clients) : fixed(t.rate, 2), std::to_string(t.requests),
                 std::to_string(t.errors), with_commas(int64_t(std::lround(t.tokens_per_second()))), ms(t.token_ms),
                 ms(t.first_token_ms.p50), ms(t.first_token_ms.p99), ms(t.between_ms.p50), ms(t.between_ms.p99)});
}
OrderedJson as_json(const Quantiles& q) { return {{"p50", q.p50}, {"p99", q.p99}}; }
OrderedJson as_json(const ServeTimes& t) {
  OrderedJson json;
  if (t.clients > 0)
    json["concurrency"] = t.clients;
  else
    json["rate"] = t.rate;
  json.update({{"requests", t.requests},
               {"errors", t.errors},
               {"prompt_tokens", t.prompt_tokens},
               {"reused_tokens", t.reused_tokens},
               {"tokens", t.tokens},
               {"seconds", t.seconds},
               {"tokens_per_second", t.tokens_per_second()},
               {"token_ms", t.token_ms},
               {"first_token_ms", as_json(t.first_token_ms)},
               {"between_tokens_ms", as_json(t.between_ms)}});
  if (t.errors > 0) json["first_error"] = t.first_error;
  return json;
}

void report(const BenchServe& o, const std::vector<ServeTimes>& all) {
  const SamplingOptions& s = o.load.sampling;
  OrderedJson results = OrderedJson::array();
  for (const ServeTimes& t : all) results.push_back(as_json(t));
  write_out(show_json({{"version", version()},
                       {"commit", commit()},
                       {"url", o.url.empty() ? OrderedJson() : OrderedJson(o.url)},
                       {"model", o.load.model},
                       {"prompt", to_text(o.load.prompt)},
                       {"answer", to_text(o.load.answer)},
                       {"sampling",
                        {{"temperature", s.temperature}, {"top_k", s.top_k}, {"top_p", s.top_p}, {"min_p", s.min_p}}},
                       {"seed", o.load.seed},
                       {"results", results}}) +
            "\n");
}

void measure_loads(const BenchServe& o, const std::vector<int64_t>& concurrency, const std::vector<double>& rates) {
  std::vector<ServeTimes> all;
  const auto add = [&](const ServeTimes& t) {
    if (!o.json) print_row(t);
    if (t.errors > 0)
      log_warn(with_commas(t.errors), " of ", counted(t.requests, "request"), " failed: ", t.first_error);
    if (100 * t.reused_tokens > t.prompt_tokens)
      log_warn("the server had processed ", t.reused_tokens, " of ", t.prompt_tokens,
               " tokens of the prompts before: another --seed sends other prompts");
    all.push_back(t);
  };
  LoadGenerator generator(o.load);
  if (!o.json) {
    write_out(o.load.model + ": prompts of " + to_text(o.load.prompt) + " and answers of " + to_text(o.load.answer) +
              " tokens, temperature " + fixed(o.load.sampling.temperature, 2) + "\n");
    print_serve_head(!rates.empty());
  }
  if (rates.empty())
    for (const int64_t n : concurrency) add(generator.measure_clients(n, o.requests > 0 ? o.requests : 3, o.warm_up));
  else
    generator.measure_clients(1, 0, o.warm_up);
  for (const double rate : rates) add(generator.measure_arrivals(rate, requests_of_rate(o)));
  if (o.json) report(o, all);
  if (std::all_of(all.begin(), all.end(), [](const ServeTimes& t) { return t.errors == t.requests; }))
    fail(ErrorCode::io, "all requests failed: ", all[0].first_error);
}

void bench_serve(const Command& c, BenchServe& o) {
  const std::vector<int64_t> concurrency = numbers_in("--concurrency", o.concurrency);
  const std::vector<double> rates = rates_of(o.rates);
  const int64_t most = concurrency.empty() ? 1 : *std::max_element(concurrency.begin(), concurrency.end());
  if (most > 4096) fail(ErrorCode::usage, "--concurrency: found ", most, ", expected at most 4096");
  o.load.seed = o.seed;
  o.load.prompt = range_of("--prompt", o.prompt), o.load.answer = range_of("--tokens", o.answer);
  if (!o.key_file.empty()) o.load.key = read_keys(o.key_file)[0];
  if (!rates.empty()) c.refuse_given({"concurrency"}, "--rate");
  std::optional<ServerProcess> server;
  if (o.url.empty()) {
    const std::string model = chosen_model(o.run, o.model, o.synthetic);
    server.emplace(rates.empty() ? server_words(o, model, most, most)
                                 : server_words(o, model, kSlotsOfRates, requests_of_rate(o)));
    o.load.url = http_url(server->url());
  } else {
    c.refuse_given({"RUN", "model", "synthetic", "dense", "serve"}, "--url, whose server runs already");
    o.load.url = http_url(o.url);
    if (o.load.url.path.ends_with("/v1")) o.load.url.path.resize(o.load.url.path.size() - 3);
  }
  const ServedModel served = served_model(o.load);
  o.load.model = served.name;
  o.load.vocab = o.vocab > 0 ? o.vocab : served.vocab;
  if (o.load.vocab == 0)
    fail(ErrorCode::usage, to_text(o.load.url),
         ": found a server that does not say how many tokens its vocabulary has, expected --vocab N");
  measure_loads(o, concurrency, rates);
}

}  // namespace

void add_bench_serve(Command& bench_command) {
  Command& c = bench_command.add("serve",
                                 "Measures a server from its clients: tokens/s, time to the first token, time between "
                                 "tokens, at rising numbers of concurrent requests");
  auto o = std::make_shared<BenchServe>();
  add_model(c, o->run, o->model);
  add_synthetic(c, o->synthetic);
  c.text("--serve OPTIONS", o->server_options,
         "options of the started `ingot serve`, as one argument: --serve '--slots 16 --gpus 2' (default: as many slots "
         "as concurrent requests, at most 256)");
  c.text("--url URL", o->url, "in place of RUN: a running server with OpenAI's API, such as http://127.0.0.1:8080");
  c.text("--api-key-file FILE", o->key_file, "a file of keys, as of `ingot serve`; the first key is sent");
  c.integer("--vocab N", o->vocab, 1, INT32_MAX,
            "prompts are random ids below N (default: the vocabulary that the server states)");
  c.text("--concurrency LIST", o->concurrency, "numbers of concurrent requests (default: 1,2,4,8,16,32,64)");
  c.text("--rate LIST", o->rates,
         "in place of --concurrency: requests per second, such as 0.5,2,8; they arrive at random times, however many "
         "are unanswered");
  c.integer("--requests N", o->requests, 1, 1 << 20,
            "requests per client, one after the other (default: 3); with --rate, requests in total (default: 64)");
  c.integer("--warm-up N", o->warm_up, 0, 1 << 20, "requests per client that are not counted (default: 1)");
  c.text("--prompt N", o->prompt, "tokens of a prompt, or a range like 100-2000 (default: 500)");
  c.text("--tokens N", o->answer, "most tokens of an answer, or a range (default: 200)");
  add_options(c, o->load.sampling);
  c.unsigned_integer("--seed N", o->seed, "the same seed gives the same requests at the same times (default: 1)");
  c.number("--patience SECONDS", o->load.seconds, 0.1, 3600,
           "how long a client waits for the next bytes before it counts an error (default: 60)");
  c.flag("--json", o->json, "print one JSON object");
  c.examples(R"(  ingot bench serve --synthetic 20b
  ingot bench serve --model gpt-oss-20b --concurrency 1,16 --top-p 0.9
  ingot bench serve --synthetic 20b --rate 1,4,16 --prompt 100-2000 --tokens 20-400
  ingot bench serve --url http://127.0.0.1:8000 --vocab 199998)");
  c.run([o, &c] { bench_serve(c, *o); });
}

}  // namespace ingot::cli
