#include "ingot/engines/serve/service.h"

#include <algorithm>
#include <ctime>
#include <random>
#include <utility>

#include "ingot/core/log.h"
#include "ingot/engines/serve/answer_grammar.h"
#include "ingot/engines/serve/request_errors.h"
#include "ingot/engines/serve/ticket.h"
#include "ingot/io/json.h"

namespace ingot {
namespace {

uint64_t random_seed() {
  static thread_local std::random_device device;
  return uint64_t(device()) << 32 | device();
}

}  // namespace

Service::Service(OpenedModel model, Vocabulary vocabulary, const ServiceOptions& options)
    : options_(options), model_(std::move(model)), vocabulary_(std::move(vocabulary)), created_(std::time(nullptr)) {
  scheduler_ = std::make_unique<Scheduler>(*model_.decoder, options_.scheduling);
}
Service::~Service() = default;

ServeRequest Service::request_of(const ApiRequest& r, std::vector<int32_t> prompt, uint64_t seed,
                                 const std::string& client) const {
  const Decoder& d = *model_.decoder;
  ServeRequest s{.prompt = std::move(prompt),
                 .tokens = r.tokens < 0 ? d.context() : r.tokens,
                 .sampling = r.sampling,
                 .seed = seed,
                 .vocab = samplable(),
                 .bias = r.bias,
                 .stop_ids = r.chat ? vocabulary_.chat->stop_ids() : model_.end_ids,
                 .frequency_penalty = r.frequency_penalty,
                 .presence_penalty = r.presence_penalty,
                 .client = client};
  s.stop_ids.insert(s.stop_ids.end(), r.stop_ids.begin(), r.stop_ids.end());
  s.logprobs = r.logprobs;
  return s;
}

// The grammar is kept for the client's next request with the same form.
std::shared_ptr<TokenGrammar> Service::grammar_of(const ApiRequest& r, const std::string& client) {
  constexpr size_t kKept = 8;
  const std::string key = client + '\0' + grammar_key(r);
  const std::lock_guard lock(grammar_mutex_);
  const auto at = std::find_if(grammars_.begin(), grammars_.end(), [&](const auto& g) { return g.first == key; });
  std::shared_ptr<TokenGrammar> grammar = at == grammars_.end() ? nullptr : at->second;
  if (at != grammars_.end()) grammars_.erase(at);
  if (!grammar) {
    Grammar rules;
    const Grammar::Rule start = answer_grammar(rules, r, *vocabulary_.chat);
    if (!tree_) tree_ = token_tree();
    grammar = std::make_shared<TokenGrammar>(tree_, std::move(rules), start);
  }
  grammars_.emplace_front(key, grammar);
  if (grammars_.size() > kKept) grammars_.pop_back();
  return grammar;
}

std::shared_ptr<const TokenTree> Service::token_tree() const {
  const ChatFormat& chat = *vocabulary_.chat;
  std::vector<std::string> tokens(static_cast<size_t>(samplable()));
  for (size_t id = 0; id < tokens.size(); ++id)
    if (!chat.is_control(int32_t(id))) tokens[id] = vocabulary_.tokenizer->token_bytes(int32_t(id));
  return std::make_shared<const TokenTree>(tokens, chat.grammar_controls());
}
int64_t Service::samplable() const {
  return std::min<int64_t>(model_.decoder->vocab(), vocabulary_.tokenizer->vocab_size());
}

std::shared_ptr<Service::Ticket> Service::ask(const ApiRequest& r, const std::string& client, ApiAnswer answer) {
  if (!r.model.empty()) check_name(r.model);
  for (const LogitBias& b : r.bias) detail::check_id(b.id, model_.decoder->vocab(), "logit_bias");
  for (const int32_t id : r.stop_ids) detail::check_id(id, model_.decoder->vocab(), "stop_token_ids");
  log_ignored(r.ignored);
  auto ticket = std::make_shared<Ticket>(*this, r, std::move(answer));
  try {
    const auto prompts = prompts_of(r);
    ticket->begin_writer(int64_t(prompts[0].ids.size()));
    if (has_grammar(r)) ticket->set_grammar(grammar_of(r, client));
    for (size_t i = 0; i < prompts.size() * size_t(r.n); ++i) ticket->add_choice();
    uint64_t seed = r.seed.value_or(random_seed());
    size_t index = 0;
    const std::vector<int32_t> predicted = prediction_of(r, prompts[0].ids);
    for (const Prompt& prompt : prompts)
      for (int64_t i = 0; i < r.n; ++i, seed += 0x9e3779b97f4a7c15u) {  // each choice has its own random numbers
        ServeRequest s = request_of(r, prompt.ids, seed, client);
        s.prediction = predicted;
        if (r.echo) ticket->set_echo(index, prompt.text, prompt.ids, prompt.hidden);
        ticket->hook(s, index++);
        ticket->add(scheduler_->submit(std::move(s)));
      }
  } catch (...) {
    ticket->abandon();
    throw detail::api_error_of(std::current_exception());
  }
  return ticket;
}

// Logs each field once, because clients send a field with every request. Clients choose the names, so their number is
// bounded.
void Service::log_ignored(const std::vector<std::string>& fields) {
  constexpr size_t kMostNames = 256;
  const std::lock_guard lock(mutex_);
  for (const std::string& field : fields) {
    const std::string name = field.substr(0, 100);
    if (logged_fields_.size() < kMostNames && logged_fields_.insert(name).second)
      log_info("a request has a field that changes nothing here: ", show_json(OrderedJson(name)));
  }
}

void Service::cancel(const std::shared_ptr<Ticket>& ticket) { ticket->cancel(); }

void Service::count(const ServeOutcome& o) {
  const std::lock_guard lock(mutex_);
  queue_.add(o.queue_seconds);
}

void Service::check_name(const std::string& name) const {
  if (name != options_.name)
    throw ApiError(404, "model: found '" + name.substr(0, 100) + "', expected " + options_.name, "model",
                   "model_not_found");
}

std::string Service::model_json(const std::string& name) const {
  check_name(name);
  return show_json({{"id", options_.name},
                    {"object", "model"},
                    {"created", created_},
                    {"owned_by", "ingot"},
                    {"max_model_len", model_.decoder->context()},
                    {"meta", {{"n_vocab", model_.decoder->vocab()}}},  // as llama.cpp's server
                    {"chat", chats()}});
}
std::string Service::models_json() const {
  return "{\"object\":\"list\",\"data\":[" + model_json(options_.name) + "]}";
}

}  // namespace ingot
