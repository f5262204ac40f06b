#include "ingot/apps/cli/measure/serve_load.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <mutex>
#include <numeric>
#include <thread>

#include "ingot/core/rng.h"
#include "ingot/io/json.h"

namespace ingot {
namespace {

using Clock = std::chrono::steady_clock;
double ms_between(Clock::time_point a, Clock::time_point b) {
  return std::chrono::duration<double, std::milli>(b - a).count();
}

// The observations of one client on one request.
struct Seen {
  std::string error;  // empty: the answer is complete
  int64_t prompt = 0, tokens = 0, reused = 0;
  double first_ms = 0, last_ms = 0;  // from sending the request to the first text and to the last text
  std::vector<double> between_ms;
};

HttpConnection::Headers headers_of(const ServeLoad& load) {
  HttpConnection::Headers headers = {{"Content-Type", "application/json"}};
  if (!load.key.empty()) headers.emplace_back("Authorization", "Bearer " + load.key);
  return headers;
}

int64_t length_in(const LengthRange& range, const Rng& rng, uint64_t index) {
  return range.least + int64_t(rng.below(index, uint64_t(range.most - range.least + 1)));
}

// The body of the request with this number, which is the same in every run with this seed.
std::string body_of(const ServeLoad& load, uint32_t number) {
  const Rng rng(load.seed, Purpose::test, number);
  std::vector<int64_t> ids(size_t(length_in(load.prompt, rng, 0)));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = int64_t(rng.below(i + 2, uint64_t(load.vocab)));
  OrderedJson body;
  if (!load.model.empty()) body["model"] = load.model;
  body["prompt"] = ids;
  body["max_tokens"] = length_in(load.answer, rng, 1);
  body["temperature"] = load.sampling.temperature;
  body["top_p"] = load.sampling.top_p;
  body["top_k"] = load.sampling.top_k;
  body["min_p"] = load.sampling.min_p;
  body["seed"] = rng.block(~uint64_t(0))[0] >> 1;
  body["stream"] = true;
  body["stream_options"] = {{"include_usage", true}};
  return show_json(body);
}

// Reads the events of a stream. Only events without text are parsed as JSON, because parsing all of them would cost as
// much as a token of a small model.
class AnswerReader {
 public:
  explicit AnswerReader(Seen& seen) : seen_(seen), sent_(Clock::now()) {}

  void push(std::string_view bytes) {
    const Clock::time_point now = Clock::now();
    if (raw_.size() < 400) raw_ += bytes.substr(0, 400 - raw_.size());
    events_.push(bytes, [&](std::string_view event) { take(event, now); });
  }
  void end(int status) {
    if (status != 200)
      seen_.error = detail::concat("status ", status, ": ", raw_.substr(0, raw_.find_first_of("\r\n")));
    else if (seen_.error.empty() && !done_)
      seen_.error = "the stream ended without [DONE]";
    else if (seen_.error.empty() && texts_ == 0)
      seen_.error = "an answer without text";
    if (seen_.tokens == 0) seen_.tokens = texts_;  // for a server that does not report the count
  }

 private:
  static bool has_text(std::string_view event) {
    const size_t text = event.find("\"text\":");
    if (text == event.npos) return false;
    const size_t quote = event.find_first_not_of(' ', text + 7);
    return quote + 1 < event.size() && event[quote] == '"' && event[quote + 1] != '"';
  }
  void take(std::string_view event, Clock::time_point now) {
    if (event == "[DONE]") {
      done_ = true;
    } else if (has_text(event)) {
      const double ms = ms_between(sent_, now);
      texts_ == 0 ? void(seen_.first_ms = ms) : seen_.between_ms.push_back(ms - seen_.last_ms);
      seen_.last_ms = ms;
      ++texts_;
    }
    if (event.find("\"usage\":{") != event.npos || event.find("\"usage\": {") != event.npos ||
        event.find("\"error\"") != event.npos)
      take_rest(event);
  }
  void take_rest(std::string_view event) {
    const Json json = parse_json(event, "an event of the stream");
    if (json.contains("error")) seen_.error = show_json(json["error"]);
    if (!json.contains("usage") || !json["usage"].is_object()) return;
    seen_.prompt = json["usage"].value("prompt_tokens", int64_t(0));
    seen_.tokens = json["usage"].value("completion_tokens", int64_t(0));
    if (const auto details = json["usage"].find("prompt_tokens_details");
        details != json["usage"].end() && details->is_object())
      seen_.reused = details->value("cached_tokens", int64_t(0));
  }

  Seen& seen_;
  const Clock::time_point sent_;
  EventStream events_;
  std::string raw_;  // the beginning of the body, for error messages
  int64_t texts_ = 0;
  bool done_ = false;
};

Seen ask(HttpConnection& connection, const ServeLoad& load, const std::string& body) {
  Seen seen;
  try {
    AnswerReader reader(seen);
    reader.end(connection.request("POST", "/v1/completions", headers_of(load), body,
                                  [&](std::string_view bytes) { reader.push(bytes); }));
  } catch (const Error& e) {
    seen.error = e.what();
    connection.close();
  }
  return seen;
}

Quantiles quantiles(std::vector<double>& values) {
  if (values.empty()) return {};
  std::sort(values.begin(), values.end());
  return {.p50 = values[values.size() / 2], .p99 = values[values.size() * 99 / 100]};
}

ServeTimes times_of(const std::vector<Seen>& all, double seconds) {
  ServeTimes t{.requests = int64_t(all.size()), .seconds = seconds};
  std::vector<double> first, between, token;
  for (const Seen& s : all) {
    if (!s.error.empty()) {
      if (t.errors++ == 0) t.first_error = s.error;
      continue;
    }
    t.prompt_tokens += s.prompt, t.tokens += s.tokens, t.reused_tokens += s.reused;
    first.push_back(s.first_ms);
    between.insert(between.end(), s.between_ms.begin(), s.between_ms.end());
    if (s.tokens > 1) token.push_back((s.last_ms - s.first_ms) / double(s.tokens - 1));
  }
  t.first_token_ms = quantiles(first), t.between_ms = quantiles(between);
  if (!token.empty()) t.token_ms = std::accumulate(token.begin(), token.end(), 0.0) / double(token.size());
  return t;
}

}  // namespace

std::string to_text(const LengthRange& r) {
  return r.least == r.most ? std::to_string(r.least) : std::to_string(r.least) + "-" + std::to_string(r.most);
}

std::vector<std::string> LoadGenerator::next_bodies(int64_t count) {
  std::vector<std::string> bodies;
  for (int64_t i = 0; i < count; ++i) bodies.push_back(body_of(load_, sent_++));
  return bodies;
}

ServeTimes LoadGenerator::measure_clients(int64_t clients, int64_t requests, int64_t warm_up) {
  const int64_t each = warm_up + requests;
  const std::vector<std::string> bodies = next_bodies(clients * each);
  std::vector<std::unique_ptr<HttpConnection>> connections;
  for (int64_t i = 0; i < clients; ++i)
    connections.push_back(std::make_unique<HttpConnection>(load_.url, load_.seconds));
  std::vector<Seen> seen(size_t(clients * requests));
  const auto run = [&](int64_t first, int64_t count, bool counted) {
    std::vector<std::thread> threads;
    for (int64_t c = 0; c < clients; ++c)
      threads.emplace_back([&, c] {
        for (int64_t i = 0; i < count; ++i) {
          Seen one = ask(*connections[size_t(c)], load_, bodies[size_t(c * each + first + i)]);
          if (counted) seen[size_t(c * requests + i)] = std::move(one);
        }
      });
    for (std::thread& t : threads) t.join();
  };
  run(0, warm_up, false);
  const Clock::time_point begin = Clock::now();
  run(warm_up, requests, true);
  ServeTimes t = times_of(seen, 1e-3 * ms_between(begin, Clock::now()));
  t.clients = clients;
  return t;
}

ServeTimes LoadGenerator::measure_arrivals(double rate, int64_t requests) {
  const std::vector<std::string> bodies = next_bodies(requests);
  std::vector<double> at;  // arrival times in seconds from the start
  const Rng rng(load_.seed, Purpose::test, ~uint32_t(0));
  for (int64_t i = 0; i < requests; ++i)
    at.push_back(at.empty() ? 0 : at.back() - std::log(rng.uniform(uint64_t(i))) / rate);
  std::vector<Seen> seen(static_cast<size_t>(requests));
  std::vector<std::thread> threads;
  const Clock::time_point begin = Clock::now();
  for (size_t i = 0; i < bodies.size(); ++i) {
    std::this_thread::sleep_until(begin +
                                  std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(at[i])));
    threads.emplace_back([&, i] {
      HttpConnection connection(load_.url, load_.seconds);
      seen[i] = ask(connection, load_, bodies[i]);
    });
  }
  for (std::thread& t : threads) t.join();
  ServeTimes t = times_of(seen, 1e-3 * ms_between(begin, Clock::now()));
  t.rate = rate;
  return t;
}

ServedModel served_model(const ServeLoad& load) {
  HttpConnection connection(load.url, load.seconds);
  std::string body;
  const int status =
      connection.request("GET", "/v1/models", headers_of(load), {}, [&](std::string_view bytes) { body += bytes; });
  const std::string where = to_text(load.url) + "/v1/models";
  if (status != 200) fail(ErrorCode::io, where, ": found status ", status, ", expected 200: ", body.substr(0, 400));
  const Json json = parse_json(body, where);
  if (!json.is_object() || !json.contains("data") || !json["data"].is_array() || json["data"].empty() ||
      !json["data"][0].is_object())
    fail(ErrorCode::bad_data, where, ": found ", body.substr(0, 200), ", expected a list of models");
  const Json& model = json["data"][0];
  ServedModel found{.name = model.value("id", "")};
  if (model.contains("meta") && model["meta"].is_object()) found.vocab = model["meta"].value("n_vocab", int64_t(0));
  return found;
}

}  // namespace ingot
