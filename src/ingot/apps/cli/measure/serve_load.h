#pragma once
// The requests that `ingot bench serve` sends to a server with OpenAI's API, and the times that its clients measure.
#include <functional>
#include <string>
#include <vector>

#include "ingot/apps/cli/measure/http_client.h"
#include "ingot/models/decoder.h"

namespace ingot {

// A number of tokens, uniform from `least` to `most`.
struct LengthRange {
  int64_t least = 0, most = 0;
};
std::string to_text(const LengthRange& range);  // "500", "100-2000"

struct ServeLoad {
  HttpUrl url;        // without /v1
  std::string model;  // empty: requests name no model
  std::string key;    // empty: requests carry no key
  LengthRange prompt{500, 500}, answer{200, 200};
  int64_t vocab = 1;  // prompts are random ids below this number, different for each request
  SamplingOptions sampling;
  uint64_t seed = 1;    // seed of lengths, prompts, arrivals, and of each request's sampling
  double seconds = 60;  // how long a client waits for the next bytes before it reports an error
};
struct Quantiles {
  double p50 = 0, p99 = 0;
};
struct ServeTimes {
  int64_t clients = 0;  // number of concurrent requests, or 0: requests arrive at `rate`
  double rate = 0;      // requests per second
  int64_t requests = 0, errors = 0;
  std::string first_error;
  int64_t prompt_tokens = 0, tokens = 0;  // sums over complete answers
  int64_t reused_tokens = 0;              // tokens of prompts that the server reports as processed before
  double seconds = 0;                     // from the first request to the last byte of the last answer
  // The time from sending a request to its first text, and from one event with text to the next one of the same answer.
  Quantiles first_token_ms, between_ms;
  double token_ms = 0;  // mean of (last text - first text) / (tokens - 1) of all answers
  double tokens_per_second() const { return seconds > 0 ? double(tokens) / seconds : 0; }
};

// The server's description of its model under /v1/models.
struct ServedModel {
  std::string name;
  int64_t vocab = 0;  // 0: not reported
};
ServedModel served_model(const ServeLoad& load);

// Sends requests that differ from all earlier ones, so that a server cannot reuse what it has processed.
class LoadGenerator {
 public:
  explicit LoadGenerator(const ServeLoad& load) : load_(load) {}
  // `clients` clients run at the same time. Each client sends `warm_up` requests that are not counted, then `requests`
  // counted requests; a client sends its next request when the last answer has ended. All requests are streamed
  // completions.
  ServeTimes measure_clients(int64_t clients, int64_t requests, int64_t warm_up);
  // Sends the first request at once and the others at random times: the intervals between arrivals are exponentially
  // distributed.
  ServeTimes measure_arrivals(double rate, int64_t requests);

 private:
  std::vector<std::string> next_bodies(int64_t count);
  const ServeLoad load_;
  uint32_t sent_ = 0;
};

}  // namespace ingot
