#pragma once
// The body of a request to POST /v1/completions, /v1/chat/completions or /v1/responses, as OpenAI's clients write it.
// A field of the wrong type or out of range is an ApiError that names the field, and so is a field that would change
// the answer and that Ingot does not support. A field of null is absent. Other fields are ignored, and
// ApiRequest::ignored has their names; ApiLimits::strict_fields makes each an ApiError. Nothing here depends on a
// model.
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ingot/engines/serve/api_error.h"
#include "ingot/models/decoder.h"
#include "ingot/text/chat/chat_format.h"

namespace ingot {

struct ApiLimits {
  int64_t body = int64_t(4) << 20;  // bytes
  int64_t choices = 8;              // n, times the prompts of one request
  int64_t tools = 128;
  int64_t stops = 4, stop_bytes = 256;
  int64_t logprobs = 20, bias = 1024;
  bool strict_fields = false;  // unknown fields, tools that are no functions and items of other types are errors
};

using ApiCall = ChatCall;
struct ApiMessage {
  std::string role, content, reasoning;  // role: system, developer, user, assistant, tool
  std::vector<ApiCall> calls;            // of an assistant
  std::string call_id;                   // which call a tool answers
  std::string path;                      // the field that it was read from
};
struct ApiPrompt {
  std::string text;
  std::vector<int32_t> ids;  // in the text's place
};

// What the text of an answer must be.
struct ApiFormat {
  enum class Kind { text, object, schema };
  Kind kind = Kind::text;
  std::string name, description, schema;  // JSON text
  std::string path;                       // the field that holds the schema
};
inline constexpr const char* kAnyFunction = "*";

struct ApiRequest {
  bool chat = false;
  bool responses = false;            // a chat in the form of /v1/responses
  bool messages_api = false;         // a chat in the form of /v1/messages
  bool shows_thoughts = true;        // of /v1/messages: whether the answer has blocks of thoughts
  std::string model;                 // empty: the one that is served
  std::vector<ApiPrompt> prompts;    // of a completion
  std::vector<ApiMessage> messages;  // of a chat
  std::vector<ChatFunction> tools;
  std::vector<std::string> strict;  // names of those whose arguments must be valid under their schema
  std::string forced;               // the function that must be called, kAnyFunction, or empty
  ApiFormat format;
  std::string reasoning;  // one of chat_efforts(), or empty: the server's choice
  int64_t n = 1;
  int64_t tokens = -1;  // most new ones; -1: as many as fit, of a completion 16
  SamplingOptions sampling;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
  std::vector<LogitBias> bias;
  double frequency_penalty = 0, presence_penalty = 0;
  int64_t logprobs = -1;  // SampleOptions
  bool echo = false;  // a completion's text begins with its prompt, whose tokens are scored where logprobs are asked
  bool stream = false, stream_usage = false;
  std::string repeated;              // of /v1/responses: the fields that the response repeats, a JSON object
  std::vector<std::string> ignored;  // names of fields that had no effect, without indices
};

ApiRequest parse_api_request(std::string_view body, bool chat, const ApiLimits& limits = {});

// POST /v1/responses: the same conversation as a list of items. Nothing is stored, so previous_response_id is refused.
ApiRequest parse_responses_request(std::string_view body, const ApiLimits& limits = {});

// POST /v1/messages, as Anthropic's clients write it, and POST /v1/messages/count_tokens.
ApiRequest parse_messages_request(std::string_view body, const ApiLimits& limits = {});

// POST /tokenize, in the fields of vLLM (prompt or messages) or llama.cpp (content), and POST /detokenize.
struct TokenizeRequest {
  std::optional<std::string> text;  // nothing: the prompt of `chat`
  ApiRequest chat;
  bool special = false;       // with the token that begins a document, where the model has one
  bool pieces = false;        // with the text of each token beside the ids, as vLLM
  bool llama_pieces = false;  // each token as {"id", "piece"}, as llama.cpp
};
TokenizeRequest parse_tokenize_request(std::string_view body, const ApiLimits& limits = {});
std::vector<int32_t> parse_detokenize_request(std::string_view body, const ApiLimits& limits = {});

// The conversation of a chat, for a chat format. A tool message whose call is not in the conversation is an ApiError.
ChatConversation conversation_of(const ApiRequest& request);

}  // namespace ingot
