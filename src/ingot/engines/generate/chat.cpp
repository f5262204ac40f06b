#include "ingot/engines/generate/chat.h"

#include <algorithm>

namespace ingot {

ChatAnswer::ChatAnswer(const ChatFormat& format, ShowChat show, std::vector<std::string> functions)
    : format_(format), parser_(format.parser(std::move(functions))), show_(std::move(show)) {}

void ChatAnswer::add(const std::vector<ChatDelta>& deltas) {
  for (const ChatDelta& d : deltas) {
    if (d.begins)
      parts_.push_back(d.added);
    else
      parts_[d.part].content += d.added.content;
    if (show_ && !d.added.content.empty()) show_(parts_[d.part], d.added.content);
  }
}

bool ChatAnswer::push(int32_t id) {
  add(parser_->push(id));
  return !parser_->ended();
}

ChatTurn ChatAnswer::finish(Answer answer) {
  ChatTurn turn{.answer = std::move(answer)};
  // A stop id that the caller chose may be a text token. Its text is not part of the answer.
  const bool control = turn.answer.stop_id >= 0 && format_.is_control(turn.answer.stop_id);
  if (control) add(parser_->push(turn.answer.stop_id));
  add(parser_->finish());
  if (parser_->ended()) turn.answer.finish = Finish::stop;
  turn.parts = std::move(parts_);
  if (control && !turn.parts.empty() && turn.parts.back().kind == ChatKind::call) turn.called = turn.parts.back().name;
  return turn;
}

ChatTurn answer(Session& session, const ChatFormat& format, const Tokenizer& tokenizer,
                const ChatConversation& conversation, SessionOptions options, const ShowChat& show) {
  const std::vector<int32_t> prompt = format.prompt(conversation);
  const Decoder& decoder = session.decoder();
  if (int64_t(prompt.size()) >= decoder.context())  // an answer needs room for a token
    fail(ErrorCode::usage, "found a conversation of ", prompt.size(), " tokens, expected fewer than ",
         decoder.context(), ", the context");
  for (const int32_t id : format.stop_ids()) options.stop_ids.push_back(id);
  options.vocab = std::min<int64_t>(decoder.vocab(), tokenizer.vocab_size());
  std::vector<std::string> functions;
  for (const ChatFunction& f : conversation.functions) functions.push_back(f.name);
  ChatAnswer said(format, show, std::move(functions));
  const auto also = options.on_token;
  options.on_token = [&](int32_t id) { return said.push(id) && (!also || also(id)); };
  return said.finish(session.generate(prompt, options));
}

Chat::Chat(Decoder& decoder, const ChatFormat& format, const Tokenizer& tokenizer, ChatConversation opening)
    : session_(decoder),
      format_(format),
      tokenizer_(tokenizer),
      conversation_(std::move(opening)),
      opening_(conversation_.messages.size()) {}

void Chat::start_over(ChatConversation opening) {
  conversation_ = std::move(opening);
  opening_ = conversation_.messages.size();
}
void Chat::set_opening(ChatConversation opening) {
  const size_t messages = opening.messages.size();
  opening.messages.insert(opening.messages.end(), conversation_.messages.begin() + int64_t(opening_),
                          conversation_.messages.end());
  conversation_ = std::move(opening);
  opening_ = messages;
}

ChatTurn Chat::say(const std::string& text, SessionOptions options, const ShowChat& show) {
  ChatConversation asked = conversation_;
  asked.messages.push_back({.role = ChatRole::user, .content = text});
  ChatTurn turn = answer(session_, format_, tokenizer_, asked, std::move(options), show);
  conversation_ = std::move(asked);
  for (ChatMessage& m : messages_of(turn.parts)) conversation_.messages.push_back(std::move(m));
  return turn;
}

}  // namespace ingot
