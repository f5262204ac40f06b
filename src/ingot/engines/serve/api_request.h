#pragma once
// Parses the body of a request to POST /v1/completions, /v1/chat/completions or /v1/responses, in the form that
// OpenAI's clients write. A field of the wrong type or out of range is an ApiError that names the field. The same holds
// for an unsupported field that would change the answer. A null field counts as absent. All other fields are ignored
// and listed in ApiRequest::ignored; with ApiLimits::strict_fields each of them is an ApiError. Nothing here depends on
// a model.
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
  int64_t choices = 8;              // n times the number of prompts in one request
  int64_t tools = 128;
  int64_t stops = 4, stop_bytes = 256, stop_ids = 64;
  int64_t logprobs = 20, bias = 1024;
  bool strict_fields = false;  // treat unknown fields, tools that are no functions and items of other types as errors
};

using ApiCall = ChatCall;
struct ApiMessage {
  std::string role, content, reasoning;  // role: system, developer, user, assistant, tool
  std::vector<ApiCall> calls;            // the calls of an assistant's message
  std::string call_id;                   // the call that a tool's message answers
  std::string path;                      // the field from which the message was read
};
struct ApiPrompt {
  std::string text;
  std::vector<int32_t> ids;  // given in place of the text
};

// The prescribed form of an answer's text.
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
  bool shows_thoughts = true;        // in chats and /v1/messages: whether the client receives the thoughts
  std::string model;                 // empty: the served model
  std::vector<ApiPrompt> prompts;    // of a completion request
  std::vector<ApiMessage> messages;  // of a chat request
  std::vector<ChatFunction> tools;
  std::vector<std::string> strict;  // names of the functions whose arguments must be valid under their schema
  std::string forced;               // the function that must be called, kAnyFunction, or empty
  bool one_call = false;            // the answer has at most one call
  ApiFormat format;
  std::string reasoning;  // one of chat_efforts(), or empty: the server's default
  int64_t n = 1;
  int64_t tokens = -1;  // the most new tokens; -1: as many as fit, for a completion request 16
  SamplingOptions sampling;
  std::optional<uint64_t> seed;
  std::optional<std::string> prediction;  // text that the answer of a chat is expected to contain
  std::vector<std::string> stop;
  std::vector<int32_t> stop_ids;  // of chats and completions: further ids that end the answer
  std::vector<LogitBias> bias;
  double frequency_penalty = 0, presence_penalty = 0;
  int64_t logprobs = -1;  // SampleOptions
  bool echo = false;  // a completion's text begins with its prompt, whose tokens are scored if logprobs are requested
  bool stream = false, stream_usage = false;
  std::string repeated;              // for /v1/responses: the fields that the response repeats, as a JSON object
  std::vector<std::string> ignored;  // names of fields without effect, without indices
};

ApiRequest parse_api_request(std::string_view body, bool chat, const ApiLimits& limits = {});

// Parses POST /v1/responses: the same conversation as a list of items. Responses are not stored, so
// previous_response_id is refused.
ApiRequest parse_responses_request(std::string_view body, const ApiLimits& limits = {});

// Parses POST /v1/messages and POST /v1/messages/count_tokens, in the form that Anthropic's clients write.
ApiRequest parse_messages_request(std::string_view body, const ApiLimits& limits = {});

// POST /tokenize, with the fields of vLLM (prompt or messages) or llama.cpp (content), and POST /detokenize.
struct TokenizeRequest {
  std::optional<std::string> text;  // absent: the prompt of `chat` is tokenized
  ApiRequest chat;
  bool special = false;       // adds the token that begins a document, where the model has one
  bool pieces = false;        // returns the text of each token beside the ids, as vLLM does
  bool llama_pieces = false;  // returns each token as {"id", "piece"}, as llama.cpp does
};
TokenizeRequest parse_tokenize_request(std::string_view body, const ApiLimits& limits = {});
std::vector<int32_t> parse_detokenize_request(std::string_view body, const ApiLimits& limits = {});

// The conversation of a chat request, for a chat format. A tool message that answers no call of the conversation is an
// ApiError.
ChatConversation conversation_of(const ApiRequest& request);

}  // namespace ingot
