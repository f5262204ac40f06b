#pragma once
// A small model and requests to a Scheduler, for tests.
#include <cmath>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "ingot/engines/generate/session.h"
#include "ingot/engines/serve/scheduler.h"
#include "ingot/models/decode/cpu/decoder.h"
#include "ingot/models/gpt_oss/random_model.test.h"
#include "ingot/testing/testing.h"

namespace ingot::testing {

struct ServedModel : RandomGptOss {
  std::unique_ptr<Decoder> decoder(int64_t slots = 1, int64_t context = 200, int64_t batch = 8) const {
    return make_decoder(config, weights, {.context = context, .batch = batch, .slots = slots});
  }
};
inline std::vector<int32_t> ids_of(uint64_t seed, int64_t n) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  fill_ids(Tensor(ids.data(), {n}), seed, 37);
  return ids;
}

// A request and its outcome.
struct Asked {
  std::vector<int32_t> tokens;
  std::vector<TokenLogprobs> logprobs;
  std::promise<ServeOutcome> end;
  std::future<ServeOutcome> ended = end.get_future();
  Scheduler::Handle job;
  ServeRequest request(std::vector<int32_t> prompt, int64_t n, std::string client = "") {
    ServeRequest r{.prompt = std::move(prompt), .tokens = n, .sampling = {.temperature = 0}, .client = client};
    r.on_token = [this](int32_t id, const TokenLogprobs* p) {
      tokens.push_back(id);
      if (p != nullptr) logprobs.push_back(*p);
      return true;
    };
    r.on_end = [this](const ServeOutcome& o) { end.set_value(o); };
    return r;
  }
  // Returns the outcome, or throws the error that ended the request.
  ServeOutcome wait() {
    if (ended.wait_for(std::chrono::seconds(60)) != std::future_status::ready)
      fail(ErrorCode::busy, "the request has not ended");
    ServeOutcome o = ended.get();
    if (o.error) std::rethrow_exception(o.error);
    return o;
  }
};
// The answer to the request `r` by a decoder of its own, without a scheduler and without other requests: what the
// scheduler must give beside any other requests.
inline Answer alone(const ServedModel& m, const ServeRequest& r) {
  const auto decoder = m.decoder(1, 400);
  SessionOptions o{.tokens = r.tokens, .sampling = r.sampling, .seed = r.seed, .stop_ids = r.stop_ids, .bias = r.bias};
  o.logprobs = r.logprobs;
  return Session(*decoder).generate(r.prompt, o);
}

// Blocks the scheduler's thread in on_token until open() is called.
struct Gate {
  std::promise<void> open, reached;
  std::shared_future<void> opened = open.get_future().share();
  bool first = true;
  void hold(ServeRequest& r) {
    r.on_token = [this, also = r.on_token](int32_t id, const TokenLogprobs* p) {
      if (std::exchange(first, false)) {
        reached.set_value();
        opened.wait();
      }
      return also(id, p);
    };
  }
};

// The most by which the log probability p of a token may differ between prompts fed in parts of different lengths,
// whose products add in different orders. A logit passes through at most eight sums a layer, each of at most hidden or
// intermediate terms; a sum of n terms rounds by at most n eps / 2 of the sum of their magnitudes. A wrong token,
// position or cached key changes p by far more.
inline double rounding_of(const GptOssConfig& c, double p) {
  const double terms = double(std::max(c.hidden, c.intermediate));
  return double(8 * c.layers) * terms * std::numeric_limits<float>::epsilon() / 2 * (1 + std::abs(p));
}

}  // namespace ingot::testing
