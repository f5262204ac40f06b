// POST /tokenize and /detokenize.
#include "ingot/engines/serve/request_body.h"

namespace ingot {

using namespace request_body;

TokenizeRequest parse_tokenize_request(std::string_view text, const ApiLimits& limits) {
  const Json json = parse_body(text, limits);
  Reading reading{.strict = limits.strict_fields};
  Object body(json, "", reading);
  TokenizeRequest t;
  t.pieces = body.flag("return_token_strs");
  t.llama_pieces = body.flag("with_pieces");
  if (body.find("messages") != nullptr) {
    t.chat.chat = true;
    read_chat(body, Source(text), t.chat, limits);
    return t;
  }
  const bool of_vllm = body.find("prompt") != nullptr;
  t.text = of_vllm ? body.require_text("prompt") : body.require_text("content");
  t.special = body.flag(of_vllm ? "add_special_tokens" : "add_special", of_vllm);
  return t;
}

std::vector<int32_t> parse_detokenize_request(std::string_view text, const ApiLimits& limits) {
  const Json json = parse_body(text, limits);
  Reading reading{.strict = limits.strict_fields};
  Object body(json, "", reading);
  const Json& tokens = body.require("tokens");
  if (!tokens.is_array()) refuse_value("tokens", tokens, "a list of token ids");
  return tokens.empty() ? std::vector<int32_t>() : ids_of(tokens, "tokens");
}

}  // namespace ingot
