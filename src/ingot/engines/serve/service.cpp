#include "ingot/engines/serve/service.h"

#include <algorithm>
#include <ctime>
#include <random>

#include "ingot/core/clock.h"
#include "ingot/core/log.h"
#include "ingot/engines/serve/answer_grammar.h"
#include "ingot/engines/serve/answer_text.h"
#include "ingot/engines/serve/completions.h"
#include "ingot/engines/serve/messages.h"
#include "ingot/engines/serve/random_word.h"
#include "ingot/engines/serve/responses.h"
#include "ingot/io/json.h"
#include "ingot/io/utf8.h"
#include "ingot/text/chat/date.h"
#include "ingot/text/utf8.h"

namespace ingot {
namespace {

uint64_t random_seed() {
  static thread_local std::random_device device;
  return uint64_t(device()) << 32 | device();
}

ApiError logged(const std::string& what) {
  const std::string id = random_word();
  log_error("request failed (", id, "): ", what);
  return ApiError(500, "the request failed; the server's log says why under " + id);
}

// The error that a client receives. Of an error that the client did not cause, the client gets only the number under
// which the log has the details.
ApiError api_error_of(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const ApiError& e) { return e; } catch (const Error& e) {
    if (e.code == ErrorCode::busy) return ApiError(429, e.what(), "", "server_busy");
    if (e.code == ErrorCode::usage) return ApiError(400, e.what());
    return logged(e.what());
  } catch (const std::exception& e) { return logged(e.what()); } catch (...) {
    return logged("something that is no exception");
  }
}

void check_id(int32_t id, int64_t ids, const std::string& param) {
  if (id < 0 || id >= ids)
    throw ApiError(400, detail::concat(param, ": found id ", id, ", expected 0 to ", ids - 1), param);
}

}  // namespace

void Histogram::add(double seconds) {
  ++counts_[size_t(std::lower_bound(kBounds.begin(), kBounds.end(), seconds) - kBounds.begin())];
  sum_ += seconds;
}

std::string Histogram::text(const std::string& name, const std::string& help) const {
  std::string out = "# HELP " + name + " " + help + "\n# TYPE " + name + " histogram\n";
  int64_t total = 0;
  for (size_t i = 0; i < counts_.size(); ++i) {
    total += counts_[i];
    const std::string bound = i < kBounds.size() ? detail::concat(kBounds[i]) : "+Inf";
    out += detail::concat(name, "_bucket{le=\"", bound, "\"} ", total, "\n");
  }
  return out + detail::concat(name, "_sum ", sum_, "\n", name, "_count ", total, "\n");
}

// One request and its choices.
class Service::Ticket : public std::enable_shared_from_this<Service::Ticket> {
 public:
  struct Choice {
    AnswerText text;
    CompletionChoice ended;  // filled while the answer comes
    Clock::time_point latest = {};
    AnswerPiece echo = {};  // the prompt, for a text that begins with the prompt
    int64_t offset = 0;     // bytes of text before the answer
    size_t scored = 0;      // tokens of the echo that have their logprobs
    bool begun = false;
    int32_t grammar_state = 0;
  };

  Ticket(Service& service, const ApiRequest& request, ApiAnswer answer)
      : service_(service), request_(request), answer_(std::move(answer)) {
    if (request.responses)
      writer_ = std::make_unique<ResponseWriter>(id_, service.options_.name, created_, request.repeated);
  }
  // Once the prompt is known.
  void begin_writer(int64_t prompt_tokens) {
    if (request_.messages_api)
      writer_ = std::make_unique<MessageWriter>(id_, service_.options_.name, prompt_tokens, request_.shows_thoughts);
    if (writer_) start_ = writer_->begin();
  }

  void add_choice() {
    AnswerText::Options o{.chat = request_.chat, .stop = request_.stop};
    for (const ChatFunction& f : request_.tools) o.functions.push_back(f.name);
    choices_.push_back({.text = AnswerText(service_.vocabulary_, o)});
    ++left_;
  }
  // Makes the text of the choice begin with its prompt. The first `hidden` tokens of `ids` stand for no text.
  void set_echo(size_t index, std::string text, std::span<const int32_t> ids, size_t hidden) {
    Choice& c = choices_[index];
    c.echo.text = std::move(text);
    c.offset = int64_t(c.echo.text.size());
    if (request_.logprobs < 0) return;
    c.scored = hidden == 0;  // nothing comes before the first token
    int64_t offset = 0;
    for (const int32_t id : ids.subspan(hidden)) {
      c.echo.tokens.push_back({.id = id, .offset = offset, .is_first = hidden == 0 && c.echo.tokens.empty()});
      offset += int64_t(service_.vocabulary_.tokenizer->added_bytes(id).size());
    }
  }
  void set_grammar(std::shared_ptr<TokenGrammar> grammar) { grammar_ = std::move(grammar); }
  void hook(ServeRequest& r, size_t index) {
    if (grammar_)
      r.allowed = [self = shared_from_this(), index](std::span<const int32_t> draft) {
        return self->masks(self->choices_[index].grammar_state, draft);
      };
    r.ready = answer_.ready;
    // Without new tokens the request ends once its prompt has been scored.
    if (request_.echo && (request_.logprobs >= 0 || request_.tokens == 0))
      r.on_prompt = [self = shared_from_this(), index](std::span<const TokenLogprobs> scores) {
        Choice& c = self->choices_[index];
        for (const TokenLogprobs& score : scores)
          if (c.scored < c.echo.tokens.size()) c.echo.tokens[c.scored++].logprobs = score;
      };
    r.on_token = [self = shared_from_this(), index](int32_t id, const TokenLogprobs* p) {
      return self->token(index, id, p);
    };
    r.on_end = [self = shared_from_this(), index](const ServeOutcome& o) { self->ended(index, o); };
  }
  // The first choices may have ended, and cancelled the rest, before the last choice is submitted.
  void add(const Scheduler::Handle& job) {
    bool late = false;
    {
      const std::lock_guard lock(jobs_mutex_);
      jobs_.push_back(job);
      late = cancelled_;
    }
    if (late) service_.scheduler_->cancel(job);
  }
  void cancel() {
    std::vector<std::weak_ptr<Scheduler::Job>> jobs;
    {
      const std::lock_guard lock(jobs_mutex_);
      cancelled_ = true;
      jobs = jobs_;
    }
    for (const auto& weak : jobs)
      if (const auto job = weak.lock()) service_.scheduler_->cancel(job);
  }
  // The request was refused after some of its choices had been submitted: nothing more is sent.
  void abandon() {
    abandoned_ = true;
    cancel();
  }

 private:
  // --- on the scheduler's thread
  // The grammar's masks of the next token and of the tokens after the draft's, as far as the grammar allows the draft.
  std::vector<ServeRequest::Mask> masks(int32_t state, std::span<const int32_t> draft) {
    std::vector<ServeRequest::Mask> masks = {grammar_->allowed(state)};
    for (const int32_t id : draft) {
      if (id < 0 || id >= service_.samplable() || ((*masks.back())[size_t(id / 32)] >> (id % 32) & 1) == 0) break;
      state = grammar_->next(state, id);
      try {
        masks.push_back(grammar_->allowed(state));
      } catch (const Error&) { break; }  // the token ends the answer
    }
    return masks;
  }
  bool token(size_t index, int32_t id, const TokenLogprobs* logprobs) {
    Choice& c = choices_[index];
    time_token(c);
    if (grammar_) c.grammar_state = grammar_->next(c.grammar_state, id);
    echo(c, index);
    show(index, moved(c.text.push(id, logprobs), c.offset));
    return !c.text.ended();
  }
  // The piece, with the offsets of its tokens increased.
  static AnswerPiece moved(AnswerPiece piece, int64_t bytes) {
    for (TokenInfo& t : piece.tokens) t.offset += bytes;
    return piece;
  }
  // Sends the echo after the prompt has been computed.
  void echo(Choice& c, size_t index) {
    if (request_.echo) show(index, std::exchange(c.echo, {}));
  }
  void time_token(Choice& c) {
    const auto now = Clock::now();
    const std::lock_guard lock(service_.mutex_);
    if (c.latest == Clock::time_point())
      service_.first_token_.add(std::chrono::duration<double>(now - arrived_).count());
    else
      service_.between_tokens_.add(std::chrono::duration<double>(now - c.latest).count());
    c.latest = now;
  }

  void begin(size_t index) {
    if (!std::exchange(choices_[index].begun, true) && request_.chat) answer_.event(completions_.begin(index));
  }
  void show(size_t index, AnswerPiece piece) {
    if (piece.empty() || abandoned_) return;
    if (writer_) return write(writer_->add(piece));
    if (!request_.stream) return collect(choices_[index].ended, std::move(piece));
    begin(index);
    answer_.event(completions_.add(index, piece));
  }
  // Events of a writer.
  void write(const std::string& events) {
    if (!request_.stream) return;
    answer_.event(std::exchange(begun_, true) ? events : start_ + events);
  }
  static void collect(CompletionChoice& c, AnswerPiece piece) {
    c.answer.text += piece.text;
    c.answer.reasoning += piece.reasoning;
    std::move(piece.tokens.begin(), piece.tokens.end(), std::back_inserter(c.answer.tokens));
    for (CallPiece& call : piece.calls) {
      if (call.index >= c.calls.size()) c.calls.resize(call.index + 1);
      if (!call.name.empty()) c.calls[call.index].name = call.name, c.calls[call.index].id = call.id;
      c.calls[call.index].arguments += call.arguments;
    }
  }

  void ended(size_t index, const ServeOutcome& o) {
    service_.count(o);
    Choice& c = choices_[index];
    c.ended.outcome = o;
    if (!error_ && (o.error || o.finish == Finish::cancelled)) {
      error_ =
          o.error ? o.error : std::make_exception_ptr(ApiError(503, "the answer was cut off: the server is closing"));
      cancel();  // the remaining choices: the request as a whole has failed
    }
    if (!error_ && !abandoned_) {
      echo(c, index);
      show(index, moved(c.text.finish(o.stop_id), c.offset));
      if (request_.stream && !writer_) {
        begin(index);
        answer_.event(completions_.end(index, o.finish, c.text.called()));
      }
    }
    c.ended.called = c.text.called(), c.ended.thought_tokens = c.text.thought_tokens();
    if (--left_ == 0 && !abandoned_) end();
  }
  void end() {
    {
      const std::lock_guard lock(service_.mutex_);
      service_.whole_.add(seconds_since(arrived_));
    }
    if (error_) {
      const ApiError e = api_error_of(error_);
      if (!request_.stream) return answer_.end(e.status, request_.messages_api ? to_messages_json(e) : to_json(e));
      if (writer_)
        write(writer_->fail(e));
      else
        answer_.event("data: " + to_json(e) + "\n\n");
      return answer_.end(200, "");
    }
    if (writer_) {
      const ServeOutcome& o = choices_[0].ended.outcome;
      const bool cut = o.finish == Finish::length || o.finish == Finish::context;
      const AnswerText& text = choices_[0].text;
      write(writer_->end(
          {.cut = cut,
           .stop_string = text.stop_string(),
           .usage = {
               .prompt = o.prompt, .cached = o.reused, .tokens = o.tokens, .thought_tokens = text.thought_tokens()}}));
      return answer_.end(200, request_.stream ? "" : writer_->whole());
    }
    std::vector<CompletionChoice> choices;
    for (Choice& c : choices_) choices.push_back(std::move(c.ended));
    if (!request_.stream) return answer_.end(200, completions_.whole(choices));
    answer_.event(completions_.finish(choices));
    answer_.end(200, "");
  }

  Service& service_;
  const ApiRequest request_;
  const ApiAnswer answer_;
  const std::string id_ = (request_.responses      ? "resp_"
                           : request_.messages_api ? "msg_"
                           : request_.chat         ? "chatcmpl-"
                                                   : "cmpl-") +
                          random_word();
  const int64_t created_ = std::time(nullptr);
  const Clock::time_point arrived_ = Clock::now();
  const CompletionWriter completions_{
      request_, *service_.vocabulary_.tokenizer, id_, service_.options_.name, service_.options_.version, created_};
  std::unique_ptr<AnswerWriter> writer_;  // of APIs whose stream builds the whole answer
  std::string start_;                     // the writer's first events, sent with the first content
  bool begun_ = false;
  std::mutex jobs_mutex_;  // guards jobs_ and cancelled_: jobs are added while earlier jobs run
  std::vector<std::weak_ptr<Scheduler::Job>> jobs_;
  bool cancelled_ = false;
  std::vector<Choice> choices_;
  std::shared_ptr<TokenGrammar> grammar_;  // of every choice; null: answers are free
  size_t left_ = 0;
  std::exception_ptr error_;
  std::atomic<bool> abandoned_ = false;
};

Service::Service(OpenedModel model, Vocabulary vocabulary, const ServiceOptions& options)
    : options_(options), model_(std::move(model)), vocabulary_(std::move(vocabulary)), created_(std::time(nullptr)) {
  scheduler_ = std::make_unique<Scheduler>(*model_.decoder, options_.scheduling);
}
Service::~Service() = default;

// With the effort and the date that this server states in its prompts.
ChatConversation Service::conversation_for(const ApiRequest& r) const {
  ChatConversation conversation = conversation_of(r);
  conversation.effort = nearest_effort(*vocabulary_.chat, r.reasoning.empty() ? options_.reasoning : r.reasoning);
  conversation.date = options_.date == "today" ? today() : options_.date;
  return conversation;
}

std::vector<Service::Prompt> Service::prompts_of(const ApiRequest& r) const {
  std::vector<Prompt> prompts;
  const int64_t context = model_.decoder->context();
  if (int64_t(r.messages.size()) >= context)  // each message has at least one token
    throw ApiError(400,
                   detail::concat("found ", r.messages.size(), " messages, expected fewer than the context's ", context,
                                  " tokens"),
                   r.responses ? "input" : "messages", "context_length_exceeded");
  if (r.chat) {
    if (!chats())
      throw ApiError(400, "found a chat, but " + options_.name + " has no chat format: expected POST /v1/completions",
                     "messages", "unsupported_model");
    prompts.push_back({.ids = vocabulary_.chat->prompt(conversation_for(r))});
  }
  for (size_t i = 0; i < r.prompts.size(); ++i) {
    const ApiPrompt& p = r.prompts[i];
    const std::string param = r.prompts.size() > 1 ? detail::concat("prompt[", i, "]") : "prompt";
    const Tokenizer& t = *vocabulary_.tokenizer;
    if (!p.ids.empty()) {
      // The text of an echo consists of the tokenizer's tokens.
      for (const int32_t id : p.ids) check_id(id, r.echo ? samplable() : model_.decoder->vocab(), param);
      prompts.push_back({.ids = p.ids, .text = r.echo ? shown_text(t.decode(p.ids)) : ""});
      continue;
    }
    Prompt prompt{.text = p.text};
    if (vocabulary_.start >= 0) prompt.ids.push_back(vocabulary_.start);
    prompt.hidden = prompt.ids.size();
    const std::vector<int32_t> text = t.encode(p.text);
    prompt.ids.insert(prompt.ids.end(), text.begin(), text.end());
    if (prompt.ids.empty()) throw ApiError(400, param + ": found an empty prompt, expected at least one token", param);
    prompts.push_back(std::move(prompt));
  }
  for (const Prompt& p : prompts)
    if (int64_t(p.ids.size()) > context - (r.tokens == 0 ? 0 : 1))
      throw ApiError(400,
                     detail::concat("found ", p.ids.size(), " tokens, expected fewer than ", context,
                                    ", the context: an answer needs room for at least one"),
                     r.responses ? "input"
                     : r.chat    ? "messages"
                                 : "prompt",
                     "context_length_exceeded");
  return prompts;
}

// The tokens of the predicted text as an answer in the chat format, after the last few tokens of the prompt; a match of
// these tokens locates the beginning of the prediction.
std::vector<int32_t> Service::prediction_of(const ApiRequest& r, const std::vector<int32_t>& prompt) const {
  constexpr int64_t kTokensBefore = 4;
  if (!r.prediction || r.prediction->empty()) return {};
  ChatConversation conversation = conversation_for(r);
  conversation.messages.push_back({.role = ChatRole::assistant, .content = *r.prediction});
  const std::vector<int32_t> ids = vocabulary_.chat->prompt(conversation);
  const auto end_of_prompt = std::mismatch(ids.begin(), ids.end(), prompt.begin(), prompt.end()).first;
  return {end_of_prompt - std::min<int64_t>(kTokensBefore, end_of_prompt - ids.begin()), ids.end()};
}

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
  for (const LogitBias& b : r.bias) check_id(b.id, model_.decoder->vocab(), "logit_bias");
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
    throw api_error_of(std::current_exception());
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

std::string Service::count_tokens(const ApiRequest& r) const {
  return show_json({{"input_tokens", prompts_of(r)[0].ids.size()}});
}

std::string Service::tokenize(const TokenizeRequest& r) const {
  const Tokenizer& t = *vocabulary_.tokenizer;
  std::vector<int32_t> ids;
  if (!r.text) {
    ids = prompts_of(r.chat)[0].ids;
  } else {
    if (r.special && vocabulary_.start >= 0) ids.push_back(vocabulary_.start);
    const std::vector<int32_t> text = t.encode(*r.text);
    ids.insert(ids.end(), text.begin(), text.end());
  }
  OrderedJson tokens = OrderedJson::array(), strings = OrderedJson::array();
  for (const int32_t id : ids) {
    const std::string bytes = t.token_bytes(id);
    if (r.pieces) strings.push_back(shown_text(bytes));
    if (r.llama_pieces) {
      // A piece that is not valid UTF-8 is given as a list of its bytes.
      OrderedJson list = OrderedJson::array();
      for (const char c : bytes) list.push_back(int(uint8_t(c)));
      tokens.push_back({{"id", id}, {"piece", find_invalid_utf8(bytes) < 0 ? OrderedJson(bytes) : list}});
    } else {
      tokens.push_back(id);
    }
  }
  OrderedJson out = {{"count", ids.size()}, {"max_model_len", model_.decoder->context()}, {"tokens", tokens}};
  if (r.pieces) out["token_strs"] = strings;
  return show_json(out);
}

std::string Service::detokenize(const std::vector<int32_t>& ids) const {
  const Tokenizer& t = *vocabulary_.tokenizer;
  for (size_t i = 0; i < ids.size(); ++i)
    if (ids[i] < 0 || ids[i] >= t.vocab_size())
      throw ApiError(400, detail::concat("tokens[", i, "]: found ", ids[i], ", expected 0 to ", t.vocab_size() - 1),
                     detail::concat("tokens[", i, "]"));
  const std::string text = shown_text(t.decode(ids));
  return show_json({{"prompt", text}, {"content", text}});  // `prompt` as in vLLM, `content` as in llama.cpp
}

std::string Service::metrics_text() const {
  const ServeCounts c = scheduler_->counts();
  std::string out;
  const auto value = [&](const std::string& name, const char* type, const std::string& help, int64_t n) {
    out += detail::concat("# HELP ingot:", name, " ", help, "\n# TYPE ingot:", name, " ", type, "\ningot:", name, " ",
                          n, "\n");
  };
  value("num_requests_running", "gauge", "Requests that have a slot.", c.running);
  value("num_requests_waiting", "gauge", "Requests that wait for one.", c.waiting);
  value("prompt_tokens_total", "counter", "Tokens of prompts.", c.prompt_tokens);
  value("prefix_cache_hits_total", "counter", "Tokens of prompts that a slot still held.", c.reused_tokens);
  value("generation_tokens_total", "counter", "New tokens.", c.tokens);
  value("spec_decode_num_drafts_total", "counter", "Steps that computed draft tokens.", c.drafts);
  value("spec_decode_num_draft_tokens_total", "counter", "Draft tokens computed.", c.draft_tokens);
  value("spec_decode_num_accepted_tokens_total", "counter", "Draft tokens accepted.", c.accepted_tokens);
  value("request_refused_total", "counter", "Requests refused because too many waited.", c.refused);
  out +=
      "# HELP ingot:request_success_total Requests that ended, by how.\n# TYPE ingot:request_success_total counter\n";
  for (const auto& [reason, n] :
       {std::pair("stop", c.stopped), {"length", c.full}, {"abort", c.cancelled}, {"error", c.failed}})
    out += detail::concat("ingot:request_success_total{finished_reason=\"", reason, "\"} ", n, "\n");
  out +=
      "# HELP ingot:spec_decode_num_accepted_tokens_per_pos_total Draft tokens accepted, by position in the draft.\n"
      "# TYPE ingot:spec_decode_num_accepted_tokens_per_pos_total counter\n";
  for (size_t i = 0; i < c.accepted_at.size(); ++i)
    out += detail::concat("ingot:spec_decode_num_accepted_tokens_per_pos_total{position=\"", i, "\"} ",
                          c.accepted_at[i], "\n");
  const std::lock_guard lock(mutex_);
  return out + queue_.text("ingot:request_queue_time_seconds", "From arrival to a slot.") +
         first_token_.text("ingot:time_to_first_token_seconds", "From arrival to the first token.") +
         between_tokens_.text("ingot:inter_token_latency_seconds", "From one token to the next.") +
         whole_.text("ingot:e2e_request_latency_seconds", "From arrival to the end.");
}

}  // namespace ingot
