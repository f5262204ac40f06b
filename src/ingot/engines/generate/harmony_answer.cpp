#include "ingot/engines/generate/harmony_answer.h"

#include <algorithm>

namespace ingot {
namespace {

bool by_assistant(const HarmonyMessage& m) { return m.role == HarmonyRole::assistant; }

}  // namespace

std::vector<int32_t> harmony_stop_ids(const HarmonyTokens& tokens) {
  std::vector<int32_t> ids;
  for (const int32_t id : {tokens.answer_end, tokens.call, tokens.end_of_text})
    if (id != tokens.end) ids.push_back(id);
  return ids;
}

HarmonyAnswer::HarmonyAnswer(const ByteBpe& tokenizer, const HarmonyTokens& tokens, ShowHarmony show)
    : parser_(tokenizer, tokens), tokens_(tokens), show_(std::move(show)) {}

// Hands on what each message gained since the last look.
void HarmonyAnswer::show_new() {
  const std::vector<HarmonyMessage>& messages = parser_.messages();
  for (; at_ < messages.size() && by_assistant(messages[at_]); ++at_) {
    const HarmonyMessage& m = messages[at_];
    if (show_ && m.content.size() > bytes_) show_(m, std::string_view(m.content).substr(bytes_));
    bytes_ = m.content.size();
    if (at_ + 1 == messages.size()) return;  // it may still grow
    bytes_ = 0;
  }
}

bool HarmonyAnswer::push(int32_t id) {
  parser_.push(id);
  if (!parser_.messages().empty() && !by_assistant(parser_.messages().back())) return false;
  show_new();
  return true;
}

HarmonyTurn HarmonyAnswer::finish(Answer answer) {
  HarmonyTurn turn{.answer = std::move(answer)};
  if (turn.answer.stop_id >= 0) parser_.push(turn.answer.stop_id);
  parser_.finish();
  show_new();
  turn.messages = parser_.messages();
  if (const auto other = std::find_if_not(turn.messages.begin(), turn.messages.end(), by_assistant);
      other != turn.messages.end()) {
    turn.messages.erase(other, turn.messages.end());
    turn.answer.finish = Finish::stop;
  }
  if (turn.answer.stop_id == tokens_.call && !turn.messages.empty()) turn.called = turn.messages.back().recipient;
  return turn;
}

HarmonyTurn answer(Session& session, const ByteBpe& tokenizer, const HarmonyTokens& tokens,
                   std::span<const HarmonyMessage> conversation, SessionOptions options, const ShowHarmony& show) {
  const std::vector<int32_t> prompt = encode_harmony(render_harmony_prompt(conversation), tokenizer, tokens);
  const Decoder& decoder = session.decoder();
  if (int64_t(prompt.size()) >= decoder.context())  // an answer needs room for at least one token
    fail(ErrorCode::usage, "found a conversation of ", prompt.size(), " tokens, expected fewer than ",
         decoder.context(), ", the context");
  for (const int32_t id : harmony_stop_ids(tokens)) options.stop_ids.push_back(id);
  options.vocab = std::min<int64_t>(decoder.vocab(), tokenizer.vocab_size());
  HarmonyAnswer said(tokenizer, tokens, show);
  const auto also = options.on_token;
  options.on_token = [&](int32_t id) { return said.push(id) && (!also || also(id)); };
  return said.finish(session.generate(prompt, options));
}

}  // namespace ingot
