#pragma once
// A model that answers requests of OpenAI's and Anthropic's APIs, independent of the transport: a parsed request goes
// in, JSON comes out, whole or as server-sent events. Metrics count requests, tokens and times.
#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "ingot/engines/serve/api_request.h"
#include "ingot/engines/serve/scheduler.h"
#include "ingot/models/registry.h"
#include "ingot/text/grammar/token_masks.h"

namespace ingot {

struct ServiceOptions {
  std::string name;                  // the name of the model for clients
  std::string reasoning = "medium";  // if a request has no effort
  std::string date;                  // the date the model is told; empty: none, "today": the day of the request
  std::string version;
  ServeOptions scheduling;
};

// The receiver of an answer. Both functions are called on the scheduler's thread, `end` exactly once and last.
struct ApiAnswer {
  std::function<void(std::string)> event;            // of a stream: complete events
  std::function<void(int status, std::string)> end;  // the body; of a stream: empty
  std::function<bool()> ready;                       // whether the client takes more events now; empty: always
};

// Counts values up to each bound, in Prometheus' form.
class Histogram {
 public:
  void add(double seconds);
  std::string text(const std::string& name, const std::string& help) const;

 private:
  static constexpr std::array<double, 14> kBounds = {0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1,
                                                     0.25,  0.5,    1,     2.5,  10,    60,   600};
  std::array<int64_t, kBounds.size() + 1> counts_{};
  double sum_ = 0;
};

class Service {
 public:
  class Ticket;  // a request under way

  Service(OpenedModel model, Vocabulary vocabulary, const ServiceOptions& options);
  ~Service();

  // Throws ApiError; after that `answer` reports every result. Clients with different names share neither cached tokens
  // nor turns.
  std::shared_ptr<Ticket> ask(const ApiRequest& request, const std::string& client, ApiAnswer answer);
  // Says that a request is being received, until the result is released (Scheduler::announce).
  std::shared_ptr<void> announce() { return scheduler_->announce(); }
  void cancel(const std::shared_ptr<Ticket>& ticket);
  bool drain(double seconds) { return scheduler_->drain(seconds); }

  std::string models_json() const;
  std::string model_json(const std::string& name) const;  // ApiError 404 if `name` is not the model's name
  // The number of tokens of a chat's prompt: {"input_tokens": n}.
  std::string count_tokens(const ApiRequest& request) const;
  std::string tokenize(const TokenizeRequest& request) const;
  std::string detokenize(const std::vector<int32_t>& ids) const;
  std::string metrics_text() const;
  const std::string& name() const { return options_.name; }
  bool chats() const { return vocabulary_.chat != nullptr; }

 private:
  friend class Ticket;
  struct Prompt {
    std::vector<int32_t> ids;
    size_t hidden = 0;  // tokens at the beginning that the request does not have
    std::string text;
  };
  std::vector<Prompt> prompts_of(const ApiRequest& r) const;
  ServeRequest request_of(const ApiRequest& r, std::vector<int32_t> prompt, uint64_t seed,
                          const std::string& client) const;
  ChatConversation conversation_for(const ApiRequest& r) const;
  std::vector<int32_t> chat_prompt(const ApiRequest& r) const;  // ApiError where the chat format refuses the request
  std::vector<int32_t> prediction_of(const ApiRequest& r, const std::vector<int32_t>& prompt) const;
  std::shared_ptr<TokenGrammar> grammar_of(const ApiRequest& r, const std::string& client);
  std::shared_ptr<const TokenTree> token_tree() const;
  int64_t samplable() const;  // ids that have a text
  void check_name(const std::string& name) const;
  void count(const ServeOutcome& o);
  void log_ignored(const std::vector<std::string>& fields);

  const ServiceOptions options_;
  OpenedModel model_;
  const Vocabulary vocabulary_;
  const int64_t created_;
  mutable std::mutex mutex_;
  std::set<std::string> logged_fields_;
  std::mutex grammar_mutex_;
  std::shared_ptr<const TokenTree> tree_;  // made for the first request that needs a grammar
  std::deque<std::pair<std::string, std::shared_ptr<TokenGrammar>>> grammars_;  // most recent first
  Histogram queue_, first_token_, between_tokens_, whole_;
  std::unique_ptr<Scheduler> scheduler_;  // last: its thread uses the members above
};

}  // namespace ingot
