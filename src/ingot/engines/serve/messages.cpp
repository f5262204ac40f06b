#include "ingot/engines/serve/messages.h"

#include <algorithm>
#include <utility>

#include "ingot/io/json.h"

namespace ingot {

std::string to_messages_json(const ApiError& e) {
  const char* type = e.status == 401   ? "authentication_error"
                     : e.status == 403 ? "permission_error"
                     : e.status == 404 ? "not_found_error"
                     : e.status == 413 ? "request_too_large"
                     : e.status == 429 ? "rate_limit_error"
                     : e.status == 503 ? "overloaded_error"
                     : e.status >= 500 ? "api_error"
                                       : "invalid_request_error";
  constexpr size_t kLongest = 800;  // names in a message may come from the client and be as long as the request
  std::string message = e.what();
  if (message.size() > kLongest) message = message.substr(0, kLongest) + "...";
  return show_json({{"type", "error"}, {"error", {{"type", type}, {"message", message}}}});
}

struct MessageWriter::Json {
  // The API requires an object as a call's arguments; arguments that are no object are put into one under a fixed key.
  static OrderedJson input_of(const std::string& arguments) {
    const OrderedJson json = OrderedJson::parse(arguments.empty() ? "{}" : arguments, nullptr, false);
    return json.is_object() ? json : OrderedJson{{"arguments", arguments}};
  }
  static OrderedJson of(const Block& b) {
    if (b.kind == Kind::thought) return {{"type", "thinking"}, {"thinking", b.text}, {"signature", ""}};
    if (b.kind == Kind::text) return {{"type", "text"}, {"text", b.text}};
    return {{"type", "tool_use"}, {"id", b.id}, {"name", b.name}, {"input", input_of(b.text)}};
  }
  static OrderedJson usage(const MessageWriter& w) {
    return {{"input_tokens", w.usage_.prompt - w.usage_.cached},
            {"cache_creation_input_tokens", 0},
            {"cache_read_input_tokens", w.usage_.cached},
            {"output_tokens", w.usage_.tokens}};
  }
  static OrderedJson or_null(const std::string& text) { return text.empty() ? OrderedJson() : OrderedJson(text); }
  static OrderedJson message(const MessageWriter& w) {
    OrderedJson m = {{"id", w.id_}, {"type", "message"}, {"role", "assistant"}, {"model", w.model_}};
    m["content"] = OrderedJson::array();
    for (const Block& b : w.blocks_) m["content"].push_back(of(b));
    m["stop_reason"] = or_null(w.stop_reason_);
    m["stop_sequence"] = or_null(w.stop_string_);
    m["usage"] = usage(w);
    return m;
  }
  static std::string event(const std::string& type, const OrderedJson& more) {
    OrderedJson e = {{"type", type}};
    e.update(more);
    return "event: " + type + "\ndata: " + show_json(e) + "\n\n";
  }
};

MessageWriter::MessageWriter(std::string id, std::string model, int64_t prompt, bool thoughts)
    : id_(std::move(id)), model_(std::move(model)), thoughts_(thoughts), usage_{.prompt = prompt} {}

std::string MessageWriter::begin() { return Json::event("message_start", {{"message", Json::message(*this)}}); }

std::string MessageWriter::open(Kind kind, const CallPiece& call) {
  std::string out = close();
  Block block{.kind = kind, .name = call.name};
  const size_t index = blocks_.size();
  if (kind == Kind::call) block.id = "toolu_" + id_.substr(id_.find('_') + 1) + "_" + std::to_string(index) + call.id;
  blocks_.push_back(block);
  open_ = true;
  return out + Json::event("content_block_start", {{"index", index}, {"content_block", Json::of(block)}});
}

std::string MessageWriter::grow(Kind kind, const std::string& text) {
  std::string out;
  if (!open_ || blocks_.back().kind != kind) out = open(kind);
  blocks_.back().text += text;
  OrderedJson delta = kind == Kind::thought ? OrderedJson{{"type", "thinking_delta"}, {"thinking", text}}
                      : kind == Kind::text  ? OrderedJson{{"type", "text_delta"}, {"text", text}}
                                            : OrderedJson{{"type", "input_json_delta"}, {"partial_json", text}};
  return out + Json::event("content_block_delta", {{"index", blocks_.size() - 1}, {"delta", delta}});
}

std::string MessageWriter::close() {
  if (!std::exchange(open_, false)) return "";
  const size_t index = blocks_.size() - 1;
  std::string out;
  if (blocks_.back().kind == Kind::thought)
    out = Json::event("content_block_delta",
                      {{"index", index}, {"delta", {{"type", "signature_delta"}, {"signature", ""}}}});
  return out + Json::event("content_block_stop", {{"index", index}});
}

std::string MessageWriter::add(const AnswerPiece& piece) {
  std::string out;
  if (thoughts_ && !piece.reasoning.empty()) out += grow(Kind::thought, piece.reasoning);
  if (!piece.text.empty()) out += grow(Kind::text, piece.text);
  for (const CallPiece& call : piece.calls) {
    if (!call.name.empty()) out += open(Kind::call, call);
    out += grow(Kind::call, call.arguments);
  }
  return out;
}

std::string MessageWriter::end(const AnswerEnd& end) {
  std::string out = close();
  usage_ = end.usage;
  stop_string_ = end.stop_string;
  const bool calls = std::any_of(blocks_.begin(), blocks_.end(), [](const Block& b) { return b.kind == Kind::call; });
  stop_reason_ = end.cut ? "max_tokens" : !end.stop_string.empty() ? "stop_sequence" : calls ? "tool_use" : "end_turn";
  out += Json::event("message_delta",
                     {{"delta", {{"stop_reason", stop_reason_}, {"stop_sequence", Json::or_null(stop_string_)}}},
                      {"usage", Json::usage(*this)}});
  return out + Json::event("message_stop", OrderedJson::object());
}

std::string MessageWriter::fail(const ApiError& error) {
  return "event: error\ndata: " + to_messages_json(error) + "\n\n";
}

std::string MessageWriter::whole() const { return show_json(Json::message(*this)); }

}  // namespace ingot
