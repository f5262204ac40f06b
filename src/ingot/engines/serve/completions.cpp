#include "ingot/engines/serve/completions.h"

#include <algorithm>
#include <cmath>

#include "ingot/engines/serve/logprobs_json.h"
#include "ingot/engines/serve/random_word.h"
#include "ingot/io/json.h"

namespace ingot {
namespace {

// Rounded to a microsecond.
double milliseconds(double seconds) { return std::round(seconds * 1e6) / 1e3; }

const char* reason_of(Finish finish, bool called) {
  return finish == Finish::length || finish == Finish::context ? "length" : called ? "tool_calls" : "stop";
}

OrderedJson completion_logprobs(const Tokenizer& tokenizer, const std::vector<TokenInfo>& tokens) {
  OrderedJson r = {{"tokens", OrderedJson::array()},
                   {"token_logprobs", OrderedJson::array()},
                   {"top_logprobs", OrderedJson::array()},
                   {"text_offset", OrderedJson::array()}};
  for (const TokenInfo& t : tokens) {
    r["tokens"].push_back(tokenizer.token_bytes(t.id));
    r["text_offset"].push_back(t.characters);
    if (t.is_first) {
      r["token_logprobs"].push_back(nullptr);
      r["top_logprobs"].push_back(nullptr);
      continue;
    }
    r["token_logprobs"].push_back(finite_logprob(t.logprobs.sampled));
    OrderedJson top = OrderedJson::object();
    // Two tokens may have the same text once incomplete characters are replaced: the likelier token stays.
    for (const TokenLogprob& p : t.logprobs.top)
      top.emplace(shown_text(tokenizer.token_bytes(p.id)), finite_logprob(p.logprob));
    r["top_logprobs"].push_back(top);
  }
  return r;
}

std::string event_of(const OrderedJson& json) { return "data: " + show_json(json) + "\n\n"; }

// `indexed` is true in a stream. There, a piece without a name continues the call that has the same index.
OrderedJson calls_json(const std::vector<CallPiece>& calls, bool indexed) {
  OrderedJson list = OrderedJson::array();
  for (const CallPiece& call : calls) {
    OrderedJson json = OrderedJson::object();
    if (indexed) json["index"] = call.index;
    if (!call.name.empty()) json["id"] = "call_" + random_word() + call.id, json["type"] = "function";
    json["function"] = OrderedJson::object();
    if (!call.name.empty()) json["function"]["name"] = call.name;
    json["function"]["arguments"] = call.arguments;
    list.push_back(json);
  }
  return list;
}

}  // namespace

struct CompletionWriter::Json {
  static OrderedJson head(const CompletionWriter& w, const char* chat_object) {
    return {{"id", w.id_},
            {"object", w.request_.chat ? chat_object : "text_completion"},
            {"created", w.created_},
            {"model", w.model_},
            {"system_fingerprint", w.fingerprint_}};
  }
  static OrderedJson logprobs(const CompletionWriter& w, const std::vector<TokenInfo>& tokens) {
    if (w.request_.logprobs < 0) return nullptr;
    if (!w.request_.chat) return completion_logprobs(w.tokenizer_, tokens);
    return {{"content", logprobs_json(w.tokenizer_, tokens)}, {"refusal", nullptr}};
  }
  static std::string event(const CompletionWriter& w, size_t index, const OrderedJson& delta_or_text,
                           const OrderedJson& logprobs, const char* reason) {
    OrderedJson chunk = head(w, "chat.completion.chunk");
    OrderedJson choice = {{"index", index}};
    choice[w.request_.chat ? "delta" : "text"] = delta_or_text;
    choice["logprobs"] = logprobs;
    choice["finish_reason"] = reason == nullptr ? OrderedJson() : OrderedJson(reason);
    chunk["choices"] = OrderedJson::array({choice});
    if (w.request_.stream_usage) chunk["usage"] = nullptr;
    return event_of(chunk);
  }
  // The sum over all choices; a prompt counts once for its n choices.
  static OrderedJson usage(const CompletionWriter& w, const std::vector<CompletionChoice>& choices) {
    int64_t prompt = 0, cached = 0, tokens = 0, thought_tokens = 0;
    draft::Counts drafts;
    double prompt_seconds = 0, token_seconds = 0;
    for (size_t i = 0; i < choices.size(); ++i) {
      const ServeOutcome& o = choices[i].outcome;
      if (int64_t(i) % w.request_.n == 0) prompt += o.prompt, cached += o.reused;
      tokens += o.tokens;
      drafts.tokens += o.drafts.tokens, drafts.accepted += o.drafts.accepted;
      drafts.predicted += o.drafts.predicted, drafts.predicted_accepted += o.drafts.predicted_accepted;
      thought_tokens += choices[i].thought_tokens;
      prompt_seconds = std::max(prompt_seconds, o.prompt_seconds);
      token_seconds = std::max(token_seconds, o.token_seconds);
    }
    const int64_t later = tokens - int64_t(choices.size());  // the first token comes with the prompt
    const auto ratio = [](double a, double b) { return a > 0 && b > 0 ? a / b : 0; };
    const auto computed = double(prompt - cached);
    OrderedJson r = {{"usage",
                      {{"prompt_tokens", prompt},
                       {"completion_tokens", tokens},
                       {"total_tokens", prompt + tokens},
                       {"prompt_tokens_details", {{"cached_tokens", cached}}},
                       {"completion_tokens_details", {{"reasoning_tokens", thought_tokens}}}}},
                     {"timings",
                      {{"prompt_n", prompt - cached},
                       {"cache_n", cached},
                       {"prompt_ms", milliseconds(prompt_seconds)},
                       {"prompt_per_token_ms", 1e3 * ratio(prompt_seconds, computed)},
                       {"prompt_per_second", ratio(computed, prompt_seconds)},
                       {"predicted_n", tokens},
                       {"predicted_ms", milliseconds(token_seconds)},
                       {"predicted_per_token_ms", 1e3 * ratio(token_seconds, double(later))},
                       {"predicted_per_second", ratio(double(later), token_seconds)}}}};
    if (w.request_.prediction) {
      OrderedJson& details = r["usage"]["completion_tokens_details"];
      details["accepted_prediction_tokens"] = drafts.predicted_accepted;
      details["rejected_prediction_tokens"] = drafts.predicted - drafts.predicted_accepted;
    }
    if (drafts.tokens > 0) r["timings"]["draft_n"] = drafts.tokens, r["timings"]["draft_n_accepted"] = drafts.accepted;
    return r;
  }
};

CompletionWriter::CompletionWriter(const ApiRequest& request, const Tokenizer& tokenizer, std::string id,
                                   std::string model, const std::string& version, int64_t created)
    : request_(request),
      tokenizer_(tokenizer),
      id_(std::move(id)),
      model_(std::move(model)),
      fingerprint_("ingot-" + version),
      created_(created) {}

std::string CompletionWriter::begin(size_t choice) const {
  if (!request_.chat) return "";
  return Json::event(*this, choice, {{"role", "assistant"}, {"content", ""}}, nullptr, nullptr);
}

std::string CompletionWriter::add(size_t choice, const AnswerPiece& piece) const {
  const OrderedJson logprobs = piece.tokens.empty() ? OrderedJson() : Json::logprobs(*this, piece.tokens);
  if (!request_.chat) return Json::event(*this, choice, piece.text, logprobs, nullptr);
  OrderedJson delta = OrderedJson::object();
  if (!piece.reasoning.empty()) delta["reasoning_content"] = piece.reasoning;
  if (!piece.text.empty()) delta["content"] = piece.text;
  if (!piece.calls.empty()) delta["tool_calls"] = calls_json(piece.calls, true);
  return Json::event(*this, choice, delta, logprobs, nullptr);
}

std::string CompletionWriter::end(size_t choice, Finish finish, bool called) const {
  const OrderedJson nothing = request_.chat ? OrderedJson(OrderedJson::object()) : OrderedJson("");
  return Json::event(*this, choice, nothing, nullptr, reason_of(finish, called));
}

std::string CompletionWriter::finish(const std::vector<CompletionChoice>& choices) const {
  std::string events;
  if (request_.stream_usage) {
    OrderedJson chunk = Json::head(*this, "chat.completion.chunk");
    chunk["choices"] = OrderedJson::array();
    chunk.update(Json::usage(*this, choices));
    events = event_of(chunk);
  }
  return events + "data: [DONE]\n\n";
}

std::string CompletionWriter::whole(const std::vector<CompletionChoice>& choices) const {
  OrderedJson r = Json::head(*this, "chat.completion");
  r["choices"] = OrderedJson::array();
  for (size_t i = 0; i < choices.size(); ++i) {
    const CompletionChoice& c = choices[i];
    OrderedJson choice = {{"index", i}};
    if (request_.chat) {
      OrderedJson m = {{"role", "assistant"}, {"content", c.answer.text}, {"refusal", nullptr}};
      if (c.answer.text.empty() && !c.calls.empty()) m["content"] = nullptr;
      if (!c.answer.reasoning.empty()) m["reasoning_content"] = c.answer.reasoning;
      if (!c.calls.empty()) m["tool_calls"] = calls_json(c.calls, false);
      choice["message"] = m;
    } else {
      choice["text"] = c.answer.text;
    }
    choice["logprobs"] = Json::logprobs(*this, c.answer.tokens);
    choice["finish_reason"] = reason_of(c.outcome.finish, c.called);
    r["choices"].push_back(choice);
  }
  r.update(Json::usage(*this, choices));
  return show_json(r);
}

}  // namespace ingot
