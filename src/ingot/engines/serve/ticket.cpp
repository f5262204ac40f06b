#include "ingot/engines/serve/ticket.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "ingot/engines/serve/messages.h"
#include "ingot/engines/serve/request_errors.h"
#include "ingot/engines/serve/responses.h"

namespace ingot {

Service::Ticket::Ticket(Service& service, const ApiRequest& request, ApiAnswer answer)
    : service_(service), request_(request), answer_(std::move(answer)) {
  if (request.responses)
    writer_ = std::make_unique<ResponseWriter>(id_, service.options_.name, created_, request.repeated,
                                               request.logprobs < 0 ? nullptr : service.vocabulary_.tokenizer.get());
}
void Service::Ticket::begin_writer(int64_t prompt_tokens) {
  if (request_.messages_api)
    writer_ = std::make_unique<MessageWriter>(id_, service_.options_.name, prompt_tokens, request_.shows_thoughts);
  if (writer_) start_ = writer_->begin();
}
void Service::Ticket::add_choice() {
  AnswerText::Options o{.chat = request_.chat, .stop = request_.stop, .one_call = request_.one_call};
  for (const ChatFunction& f : request_.tools) o.functions.push_back(f.name);
  choices_.push_back({.text = AnswerText(service_.vocabulary_, o)});
  ++left_;
}
void Service::Ticket::set_echo(size_t index, std::string text, std::span<const int32_t> ids, size_t hidden) {
  Choice& c = choices_[index];
  c.echo.text = std::move(text);
  c.offset = int64_t(c.echo.text.size()), c.characters = characters_in(c.echo.text);
  if (request_.logprobs < 0) return;
  c.scored = hidden == 0;  // no token precedes the first token, so it has no logprobs
  int64_t offset = 0, characters = 0;
  Utf8Stream stream;  // a token may end inside a character
  for (const int32_t id : ids.subspan(hidden)) {
    const bool first = hidden == 0 && c.echo.tokens.empty();
    c.echo.tokens.push_back({.id = id, .offset = offset, .characters = characters, .is_first = first});
    const std::string bytes = service_.vocabulary_.tokenizer->added_bytes(id);
    offset += int64_t(bytes.size()), characters += characters_in(stream.push(bytes));
  }
}
void Service::Ticket::set_grammar(std::shared_ptr<TokenGrammar> grammar) { grammar_ = std::move(grammar); }
void Service::Ticket::hook(ServeRequest& r, size_t index) {
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
void Service::Ticket::add(const Scheduler::Handle& job) {
  bool late = false;
  {
    const std::lock_guard lock(jobs_mutex_);
    jobs_.push_back(job);
    late = cancelled_;
  }
  if (late) service_.scheduler_->cancel(job);
}
void Service::Ticket::cancel() {
  std::vector<std::weak_ptr<Scheduler::Job>> jobs;
  {
    const std::lock_guard lock(jobs_mutex_);
    cancelled_ = true;
    jobs = jobs_;
  }
  for (const auto& weak : jobs)
    if (const auto job = weak.lock()) service_.scheduler_->cancel(job);
}
void Service::Ticket::abandon() {
  abandoned_ = true;
  cancel();
}

std::vector<ServeRequest::Mask> Service::Ticket::masks(int32_t state, std::span<const int32_t> draft) {
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
bool Service::Ticket::token(size_t index, int32_t id, const TokenLogprobs* logprobs) {
  Choice& c = choices_[index];
  time_token(c);
  if (grammar_) c.grammar_state = grammar_->next(c.grammar_state, id);
  echo(c, index);
  show(index, moved(c.text.push(id, logprobs), c));
  return !c.text.ended();
}
AnswerPiece Service::Ticket::moved(AnswerPiece piece, const Choice& c) {
  for (TokenInfo& t : piece.tokens) t.offset += c.offset, t.characters += c.characters;
  return piece;
}
void Service::Ticket::echo(Choice& c, size_t index) {
  if (request_.echo) show(index, std::exchange(c.echo, {}));
}
void Service::Ticket::time_token(Choice& c) {
  const auto now = Clock::now();
  const std::lock_guard lock(service_.mutex_);
  if (c.latest == Clock::time_point())
    service_.first_token_.add(std::chrono::duration<double>(now - arrived_).count());
  else
    service_.between_tokens_.add(std::chrono::duration<double>(now - c.latest).count());
  c.latest = now;
}
void Service::Ticket::begin(size_t index) {
  if (!std::exchange(choices_[index].begun, true) && request_.chat) answer_.event(completions_.begin(index));
}
void Service::Ticket::show(size_t index, AnswerPiece piece) {
  if (!request_.shows_thoughts && !writer_) piece.reasoning.clear();  // a writer decides whether to show thoughts
  if (piece.empty() || abandoned_) return;
  if (writer_) return write(writer_->add(piece));
  if (!request_.stream) return collect(choices_[index].ended, std::move(piece));
  begin(index);
  answer_.event(completions_.add(index, piece));
}
void Service::Ticket::write(const std::string& events) {
  if (!request_.stream) return;
  answer_.event(std::exchange(begun_, true) ? events : start_ + events);
}
void Service::Ticket::collect(CompletionChoice& c, AnswerPiece piece) {
  c.answer.text += piece.text;
  c.answer.reasoning += piece.reasoning;
  std::move(piece.tokens.begin(), piece.tokens.end(), std::back_inserter(c.answer.tokens));
  for (CallPiece& call : piece.calls) {
    if (call.index >= c.calls.size()) c.calls.resize(call.index + 1);
    if (!call.name.empty()) c.calls[call.index].name = call.name, c.calls[call.index].id = call.id;
    c.calls[call.index].arguments += call.arguments;
  }
}
void Service::Ticket::ended(size_t index, const ServeOutcome& o) {
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
    show(index, moved(c.text.finish(o.stop_id), c));
    if (request_.stream && !writer_) {
      begin(index);
      answer_.event(completions_.end(index, o.finish, c.text.called()));
    }
  }
  c.ended.called = c.text.called(), c.ended.thought_tokens = c.text.thought_tokens();
  if (--left_ == 0 && !abandoned_) end();
}
void Service::Ticket::end() {
  {
    const std::lock_guard lock(service_.mutex_);
    service_.whole_.add(seconds_since(arrived_));
  }
  if (error_) {
    const ApiError e = detail::api_error_of(error_);
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

}  // namespace ingot
