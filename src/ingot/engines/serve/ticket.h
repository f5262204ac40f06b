#pragma once
// A request under way, and its choices: the way of sampled tokens to the client's answer.
#include <atomic>
#include <cstdint>
#include <ctime>
#include <exception>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "ingot/core/clock.h"
#include "ingot/engines/serve/answer_text.h"
#include "ingot/engines/serve/answer_writer.h"
#include "ingot/engines/serve/completions.h"
#include "ingot/engines/serve/random_word.h"
#include "ingot/engines/serve/service.h"

namespace ingot {

class Service::Ticket : public std::enable_shared_from_this<Service::Ticket> {
 public:
  struct Choice {
    AnswerText text;
    CompletionChoice ended;  // filled while the answer comes
    Clock::time_point latest = {};
    AnswerPiece echo = {};               // the prompt, for a text that begins with the prompt
    int64_t offset = 0, characters = 0;  // bytes and characters of text before the answer
    size_t scored = 0;                   // tokens of the echo that have their logprobs
    bool begun = false;
    int32_t grammar_state = 0;
  };

  Ticket(Service& service, const ApiRequest& request, ApiAnswer answer);
  // Call once the prompt is known.
  void begin_writer(int64_t prompt_tokens);
  void add_choice();
  // Makes the text of the choice begin with its prompt. The first `hidden` tokens of `ids` stand for no text.
  void set_echo(size_t index, std::string text, std::span<const int32_t> ids, size_t hidden);
  void set_grammar(std::shared_ptr<TokenGrammar> grammar);
  // Makes the scheduler's request for a choice call this ticket.
  void hook(ServeRequest& r, size_t index);
  // The first choices may have ended, and cancelled the remaining choices, before the last choice is submitted.
  void add(const Scheduler::Handle& job);
  void cancel();
  // The request was refused after some of its choices had been submitted: nothing more is sent.
  void abandon();

 private:
  // The functions below are called on the scheduler's thread.

  // The grammar's masks of the next token and of the tokens after the draft's, as far as the grammar allows the draft.
  std::vector<ServeRequest::Mask> masks(int32_t state, std::span<const int32_t> draft);
  bool token(size_t index, int32_t id, const TokenLogprobs* logprobs);
  // The piece of a choice, with the places of its tokens counted from the beginning of the echo.
  static AnswerPiece moved(AnswerPiece piece, const Choice& c);
  // Sends the echo after the prompt has been computed.
  void echo(Choice& c, size_t index);
  void time_token(Choice& c);
  void begin(size_t index);
  void show(size_t index, AnswerPiece piece);
  // Events of a writer.
  void write(const std::string& events);
  static void collect(CompletionChoice& c, AnswerPiece piece);
  void ended(size_t index, const ServeOutcome& o);
  void end();

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
  std::unique_ptr<AnswerWriter> writer_;  // for APIs whose stream builds the same object as a whole answer
  std::string start_;                     // the writer's first events, sent with the first content
  bool begun_ = false;
  std::mutex jobs_mutex_;  // guards jobs_ and cancelled_: jobs are added while earlier jobs run
  std::vector<std::weak_ptr<Scheduler::Job>> jobs_;
  bool cancelled_ = false;
  std::vector<Choice> choices_;
  std::shared_ptr<TokenGrammar> grammar_;  // of every choice; null: answers are not constrained
  size_t left_ = 0;
  std::exception_ptr error_;
  std::atomic<bool> abandoned_ = false;
};

}  // namespace ingot
