// From a request to the tokens of its prompts, and between texts and tokens.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "ingot/engines/serve/answer_text.h"
#include "ingot/engines/serve/request_errors.h"
#include "ingot/engines/serve/service.h"
#include "ingot/io/json.h"
#include "ingot/io/utf8.h"
#include "ingot/text/chat/date.h"
#include "ingot/text/utf8.h"

namespace ingot {

// The conversation of a request, with the effort and the date that this server states in its prompts.
ChatConversation Service::conversation_for(const ApiRequest& r) const {
  ChatConversation conversation = conversation_of(r);
  conversation.effort = nearest_effort(*vocabulary_.chat, r.reasoning.empty() ? options_.reasoning : r.reasoning);
  conversation.date = options_.date == "today" ? today() : options_.date;
  return conversation;
}

std::vector<int32_t> Service::chat_prompt(const ApiRequest& r) const {
  if (!chats())
    throw ApiError(400, "found a chat, but " + options_.name + " has no chat format: expected POST /v1/completions",
                   "messages", "unsupported_model");
  const ChatConversation conversation = conversation_for(r);
  try {
    return vocabulary_.chat->prompt(conversation);
  } catch (const Error& e) {
    if (e.code != ErrorCode::usage) throw;
    // Some formats have no functions, or no calls of this form.
    const bool calls = std::any_of(r.messages.begin(), r.messages.end(),
                                   [](const ApiMessage& m) { return m.role == "tool" || !m.calls.empty(); });
    throw ApiError(400, e.what(), !calls && !r.tools.empty() ? "tools" : r.responses ? "input" : "messages");
  }
}

std::vector<Service::Prompt> Service::prompts_of(const ApiRequest& r) const {
  std::vector<Prompt> prompts;
  const int64_t context = model_.decoder->context();
  if (int64_t(r.messages.size()) >= context)  // each message has at least one token
    throw ApiError(400,
                   detail::concat("found ", r.messages.size(), " messages, expected fewer than the context's ", context,
                                  " tokens"),
                   r.responses ? "input" : "messages", "context_length_exceeded");
  if (r.chat) prompts.push_back({.ids = chat_prompt(r)});
  for (size_t i = 0; i < r.prompts.size(); ++i) {
    const ApiPrompt& p = r.prompts[i];
    const std::string param = r.prompts.size() > 1 ? detail::concat("prompt[", i, "]") : "prompt";
    const Tokenizer& t = *vocabulary_.tokenizer;
    if (!p.ids.empty()) {
      // The text of an echo consists of the tokenizer's tokens.
      for (const int32_t id : p.ids) detail::check_id(id, r.echo ? samplable() : model_.decoder->vocab(), param);
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

// Clients count the tokens of a conversation to learn whether the conversation fits into the context, so a conversation
// that does not fit is counted, too.
std::string Service::count_tokens(const ApiRequest& r) const {
  return show_json({{"input_tokens", chat_prompt(r).size()}});
}

std::string Service::tokenize(const TokenizeRequest& r) const {
  const Tokenizer& t = *vocabulary_.tokenizer;
  std::vector<int32_t> ids;
  if (!r.text) {
    ids = chat_prompt(r.chat);
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

}  // namespace ingot
