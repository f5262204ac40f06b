#include "ingot/engines/serve/responses.h"

#include <ctime>
#include <utility>

#include "ingot/engines/serve/logprobs_json.h"
#include "ingot/io/json.h"

namespace ingot {

struct ResponseWriter::Json {
  ResponseWriter& w;
  static OrderedJson logprobs(const ResponseWriter& w, const std::vector<TokenInfo>& tokens) {
    return w.tokenizer_ == nullptr ? OrderedJson::array() : logprobs_json(*w.tokenizer_, tokens);
  }
  static OrderedJson part(const ResponseWriter& w, const Item& item) {
    if (item.kind == Kind::reasoning) return {{"type", "reasoning_text"}, {"text", item.text}};
    return {{"type", "output_text"},
            {"text", item.text},
            {"annotations", OrderedJson::array()},
            {"logprobs", logprobs(w, item.tokens)}};
  }
  static OrderedJson of(const ResponseWriter& w, const Item& item) {
    const std::string status = item.status;
    if (item.kind == Kind::call)
      return {{"id", item.id},           {"type", "function_call"}, {"status", status},
              {"call_id", item.call_id}, {"name", item.name},       {"arguments", item.text}};
    const OrderedJson content =
        item.text.empty() && status == "in_progress" ? OrderedJson::array() : OrderedJson::array({part(w, item)});
    if (item.kind == Kind::reasoning)
      return {{"id", item.id},
              {"type", "reasoning"},
              {"status", status},
              {"summary", OrderedJson::array()},
              {"content", content}};
    return {{"id", item.id}, {"type", "message"}, {"status", status}, {"role", "assistant"}, {"content", content}};
  }
  static OrderedJson response(const ResponseWriter& w) {
    OrderedJson r = {{"id", w.id_}, {"object", "response"}, {"created_at", w.created_}};
    r["completed_at"] = w.completed_ == 0 ? OrderedJson() : OrderedJson(w.completed_);
    r.update({{"status", w.status_}, {"model", w.model_}});
    r["error"] = w.error_.empty() ? OrderedJson() : OrderedJson{{"code", "server_error"}, {"message", w.error_}};
    r["incomplete_details"] = w.status_ == "incomplete" ? OrderedJson{{"reason", "max_output_tokens"}} : OrderedJson();
    r["output"] = OrderedJson::array();
    for (const Item& item : w.items_) r["output"].push_back(of(w, item));
    r.update(OrderedJson::parse(w.repeated_));
    r["usage"] = nullptr;
    if (w.status_ != "in_progress" && w.status_ != "failed")
      r["usage"] = {{"input_tokens", w.usage_.prompt},
                    {"input_tokens_details", {{"cached_tokens", w.usage_.cached}, {"cache_write_tokens", 0}}},
                    {"output_tokens", w.usage_.tokens},
                    {"output_tokens_details", {{"reasoning_tokens", w.usage_.thought_tokens}}},
                    {"total_tokens", w.usage_.prompt + w.usage_.tokens}};
    return r;
  }
  std::string event(const std::string& type, const OrderedJson& more) {
    OrderedJson e = {{"type", type}, {"sequence_number", w.sequence_++}};
    e.update(more);
    return "event: " + type + "\ndata: " + show_json(e) + "\n\n";
  }
  std::string event_with_response(const std::string& type) { return event(type, {{"response", response(w)}}); }
  // An event that concerns the last item.
  std::string item_event(const std::string& type, OrderedJson more) {
    OrderedJson e = {{"output_index", w.items_.size() - 1}};
    if (!more.contains("item")) {
      e["item_id"] = w.items_.back().id;
      if (w.items_.back().kind != Kind::call) e["content_index"] = 0;
    }
    e.update(more);
    return event(type, e);
  }
};

namespace {
const char* name_of_delta(bool call, bool reasoning) {
  return call ? "response.function_call_arguments" : reasoning ? "response.reasoning_text" : "response.output_text";
}
}  // namespace

ResponseWriter::ResponseWriter(std::string id, std::string model, int64_t created, std::string repeated,
                               const Tokenizer* tokenizer)
    : id_(std::move(id)),
      model_(std::move(model)),
      repeated_(std::move(repeated)),
      created_(created),
      tokenizer_(tokenizer) {}

std::string ResponseWriter::begin() {
  Json json{*this};
  std::string out = json.event_with_response("response.created");
  return out + json.event_with_response("response.in_progress");
}

std::string ResponseWriter::open(Kind kind, const CallPiece& call) {
  Json json{*this};
  std::string out = close();
  const std::string number = id_.substr(id_.find('_') + 1) + "_" + std::to_string(items_.size());
  Item item{.kind = kind, .name = call.name};
  item.id = (kind == Kind::reasoning ? "rs_" : kind == Kind::message ? "msg_" : "fc_") + number;
  if (kind == Kind::call) item.call_id = "call_" + number + call.id;
  items_.push_back(item);
  open_ = true;
  out += json.item_event("response.output_item.added", {{"item", Json::of(*this, item)}});
  if (kind != Kind::call) out += json.item_event("response.content_part.added", {{"part", Json::part(*this, item)}});
  return out;
}

std::string ResponseWriter::grow(Kind kind, const std::string& text, const std::vector<TokenInfo>& tokens) {
  std::string out;
  if (!open_ || items_.back().kind != kind) out = open(kind);
  Item& item = items_.back();
  item.text += text;
  if (tokenizer_ != nullptr) item.tokens.insert(item.tokens.end(), tokens.begin(), tokens.end());
  const std::string type = name_of_delta(kind == Kind::call, kind == Kind::reasoning);
  OrderedJson more = {{"delta", text}};
  if (kind == Kind::message) more["logprobs"] = Json::logprobs(*this, tokens);
  return out + Json{*this}.item_event(type + ".delta", more);
}

std::string ResponseWriter::close(const char* status) {
  if (!std::exchange(open_, false)) return "";
  Json json{*this};
  Item& item = items_.back();
  item.status = status;
  const std::string type = name_of_delta(item.kind == Kind::call, item.kind == Kind::reasoning);
  std::string out;
  if (item.kind == Kind::call) {
    out = json.item_event(type + ".done", {{"name", item.name}, {"arguments", item.text}});
  } else {
    OrderedJson more = {{"text", item.text}};
    if (item.kind == Kind::message) more["logprobs"] = Json::logprobs(*this, item.tokens);
    out = json.item_event(type + ".done", more);
    out += json.item_event("response.content_part.done", {{"part", Json::part(*this, item)}});
  }
  return out + json.item_event("response.output_item.done", {{"item", Json::of(*this, item)}});
}

std::string ResponseWriter::add(const AnswerPiece& piece) {
  std::string out;
  if (!piece.reasoning.empty()) out += grow(Kind::reasoning, piece.reasoning);
  if (!piece.text.empty()) out += grow(Kind::message, piece.text, piece.tokens);
  for (const CallPiece& call : piece.calls) {
    if (!call.name.empty()) out += open(Kind::call, call);
    out += grow(Kind::call, call.arguments);
  }
  return out;
}

std::string ResponseWriter::end(const AnswerEnd& end) {
  status_ = end.cut ? "incomplete" : "completed";
  std::string out = close(status_.c_str());
  usage_ = end.usage;
  completed_ = std::time(nullptr);
  return out + Json{*this}.event_with_response("response." + status_);
}

std::string ResponseWriter::fail(const ApiError& error) {
  std::string out = close("incomplete");
  status_ = "failed";
  error_ = error.what();
  return out + Json{*this}.event_with_response("response.failed");
}

std::string ResponseWriter::whole() const { return show_json(Json::response(*this)); }

}  // namespace ingot
