#include "ingot/engines/generate/chat.h"

#include <gtest/gtest.h>

#include <map>

#include "ingot/io/utf8.h"
#include "ingot/models/decode/cpu/decoder.h"
#include "ingot/models/fake_decoder.test.h"
#include "ingot/models/gpt_oss/random_model.test.h"
#include "ingot/models/host_decoder.h"
#include "ingot/text/chat/harmony_format.h"

namespace ingot {
namespace {

using testing::error_of;

struct Vocabulary {
  std::shared_ptr<const ByteBpe> tokenizer = std::make_shared<ByteBpe>(learn());
  const ByteBpe& bpe = *tokenizer;
  HarmonyFormat format{tokenizer, "test"};
  const HarmonyTokens& tokens = format.tokens();
  static ByteBpe learn() {
    const std::vector<std::string_view> documents = {"assistant analysis final commentary user to=functions.f",
                                                     "assistant\nanalysis\nfinal\ncommentary\nuser"};
    return train_bpe(documents, 400,
                     {.pattern = WordPattern::o200k,
                      .special_tokens = {"<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>",
                                         "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>"}});
  }
  std::vector<int32_t> ids(std::string text) const {  // control tokens spelled out
    std::vector<int32_t> out;
    while (!text.empty()) {
      const size_t control = std::min(text.find("<|"), text.size());
      const auto part = bpe.encode(text.substr(0, control));
      out.insert(out.end(), part.begin(), part.end());
      text.erase(0, control);
      for (const SpecialToken& s : bpe.rules().specials)
        if (text.starts_with(s.text)) {
          out.push_back(s.id);
          text.erase(0, s.text.size());
          break;
        }
    }
    return out;
  }
};
const Vocabulary& vocabulary() {
  static const Vocabulary v;
  return v;
}

// A model that says the given lines in turn, each to the end, for any prompt.
class Speaker final : public testing::FakeDecoder {
 public:
  Speaker(const std::vector<std::string>& lines, int64_t context = 1000)
      : FakeDecoder({.vocab = vocabulary().bpe.vocab_size(), .context = context}) {
    for (const std::string& line : lines) lines_.push_back(vocabulary().ids(line));
  }

 private:
  void extend_slot(int slot, std::span<const int32_t> ids, Rows, const Take& take) override {
    append_ids(slot, ids);
    if (ids.size() > 1) {  // a prompt
      line_ = lines_[std::min(answers_++, lines_.size() - 1)];
      next_ = 0;
    }
    std::vector<float> logits(size_t(vocab()), 0.f);
    logits[size_t(line_[std::min(next_++, line_.size() - 1)])] = 50;
    take(int64_t(fed(slot).size()) - 1, Tensor(logits.data(), {1, vocab()}));
  }
  std::vector<std::vector<int32_t>> lines_;
  std::vector<int32_t> line_;
  size_t answers_ = 0, next_ = 0;
};

const SessionOptions kGreedy{.tokens = 100, .sampling = {.temperature = 0}};
const ChatConversation kOpening = {.identity = "It.", .effort = "low"};

ChatPart thinks(const std::string& content) {
  return {.kind = ChatKind::thought, .label = "analysis", .content = content};
}
ChatPart says(const std::string& content, const std::string& label = "final") {
  return {.kind = ChatKind::text, .label = label, .content = content};
}
using Parts = std::vector<ChatPart>;
struct Talk {
  Speaker speaker;
  Chat chat;
  explicit Talk(const std::vector<std::string>& lines, int64_t context = 1000)
      : speaker(lines, context), chat(speaker, vocabulary().format, vocabulary().bpe, kOpening) {}
};

TEST(chat, a_turn_is_rendered_in_the_format_and_its_answer_is_split_into_parts) {
  Talk t(
      {"<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>final<|message|>caf\u00e9 "
       "\u2020<|return|>",
       "<|channel|>final<|message|>two<|return|>"});
  std::vector<std::pair<std::string, std::string>> shown;  // label, text
  const auto show = [&](const ChatPart& p, std::string_view text) {
    EXPECT_TRUE(p.content.ends_with(text));
    EXPECT_LT(find_invalid_utf8(text), 0);
    if (shown.empty() || shown.back().first != p.label) shown.emplace_back(p.label, "");
    shown.back().second += text;
  };
  const ChatTurn first = t.chat.say("hi <|end|>", kGreedy, show);
  EXPECT_EQ(first.parts, (Parts{thinks("think"), says("caf\u00e9 \u2020")}));
  EXPECT_EQ(shown,
            (std::vector<std::pair<std::string, std::string>>{{"analysis", "think"}, {"final", "caf\u00e9 \u2020"}}));
  EXPECT_EQ(first.answer.finish, Finish::stop);
  EXPECT_EQ(first.answer.stop_id, vocabulary().tokens.answer_end);
  // The next turn shows the model its answer, without the thought before the answer.
  t.chat.say("and?", kGreedy);
  ChatConversation want = kOpening;
  want.messages = {{.role = ChatRole::user, .content = "hi <|end|>"},
                   {.role = ChatRole::assistant, .content = "caf\u00e9 \u2020"},
                   {.role = ChatRole::user, .content = "and?"}};
  const std::vector<int32_t> prompt = vocabulary().format.prompt(want);
  const std::vector<int32_t>& fed = t.speaker.fed();
  ASSERT_GE(fed.size(), prompt.size());
  EXPECT_EQ(std::vector<int32_t>(fed.begin(), fed.begin() + int64_t(prompt.size())), prompt);
  EXPECT_EQ(t.chat.conversation().messages.back().content, "two");
  EXPECT_EQ(t.chat.conversation().messages.size(), 5u);  // the conversation still has the thought
}

TEST(chat, a_stop_id_of_the_caller_is_no_part_of_the_text_or_of_a_call) {
  Talk t({"<|channel|>final<|message|>one two three<|return|>",
          "<|channel|>commentary to=functions.f<|message|>{\"a\": 1}<|call|>"});
  const auto stop_at = [](const std::string& text) {
    SessionOptions o = kGreedy;
    o.stop_ids = {vocabulary().ids(text).front()};
    return o;
  };
  const std::string whole = "one two three";
  const std::vector<int32_t> ids = vocabulary().ids(whole);
  const std::string stop = vocabulary().bpe.decode(std::vector<int32_t>{ids.back()});
  const ChatTurn cut = t.chat.say("a", stop_at(stop));
  EXPECT_EQ(cut.parts, Parts{says(whole.substr(0, whole.find(stop)))});
  EXPECT_EQ(cut.answer.finish, Finish::stop);
  const ChatTurn call = t.chat.say("b", stop_at("}"));
  EXPECT_EQ(call.called, "");
}

TEST(chat, prompts_do_not_grow_by_the_thoughts_of_ended_turns) {
  Talk t({"<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>final<|message|>yes<|return|>"});
  std::vector<int64_t> prompts;
  for (int turn = 0; turn < 4; ++turn) prompts.push_back(t.chat.say("hi", kGreedy).answer.prompt);
  for (size_t i = 2; i < prompts.size(); ++i) EXPECT_EQ(prompts[i] - prompts[i - 1], prompts[1] - prompts[0]) << i;
}

TEST(chat, calls_and_turns_of_other_roles_end_an_answer) {
  Talk t({"<|channel|>commentary to=functions.f<|message|>{}<|call|>",
          "<|channel|>final<|message|>yes<|end|><|start|>user<|message|>I say<|end|>",
          "<|channel|>final<|message|>cut<|endoftext|>", "no header at all<|return|>"});
  const ChatTurn call = t.chat.say("a", kGreedy);
  EXPECT_EQ(call.called, "f");
  const ChatTurn other = t.chat.say("b", kGreedy);
  EXPECT_EQ(other.parts, Parts{says("yes")});
  EXPECT_EQ(other.answer.finish, Finish::stop);
  EXPECT_EQ(t.chat.say("c", kGreedy).parts, Parts{says("cut")});
  EXPECT_EQ(t.chat.say("d", kGreedy).parts, Parts{says("no header at all", "")});
}

TEST(chat, a_cancelled_answer_stays_in_the_conversation) {
  Talk t({"<|channel|>final<|message|>abcdef<|return|>", "<|channel|>final<|message|>fine<|return|>"});
  SessionOptions o = kGreedy;
  int tokens = 0;
  o.cancelled = [&] { return tokens >= 6; };
  o.on_token = [&](int32_t) { return ++tokens > 0; };
  const ChatTurn cut = t.chat.say("a", o);
  EXPECT_EQ(cut.answer.finish, Finish::cancelled);
  ASSERT_EQ(cut.parts.size(), 1u);
  EXPECT_TRUE(std::string("abcdef").starts_with(cut.parts[0].content) && !cut.parts[0].content.empty());
  EXPECT_EQ(t.chat.say("b", kGreedy).parts, Parts{says("fine")});
}

TEST(chat, a_full_context_ends_the_answer_and_a_turn_too_long_changes_nothing) {
  ChatConversation asked = kOpening;
  asked.messages.push_back({.role = ChatRole::user, .content = "a"});
  const int64_t context = int64_t(vocabulary().format.prompt(asked).size()) + 20;
  Talk t({"<|channel|>final<|message|>and so on and so on and so on and so on and so on and so on<|return|>"}, context);
  const ChatTurn full = t.chat.say("a", kGreedy);
  EXPECT_EQ(full.answer.finish, Finish::context);
  const auto before = t.chat.conversation().messages;
  const std::string error = error_of([&] { t.chat.say(std::string(1000, 'x'), kGreedy); });
  EXPECT_TRUE(error.starts_with("usage: found a conversation of ") &&
              error.ends_with("expected fewer than " + std::to_string(context) + ", the context"))
      << error;
  EXPECT_EQ(t.chat.conversation().messages, before);
  t.chat.start_over(kOpening);
  EXPECT_EQ(t.chat.say("b", kGreedy).answer.finish, Finish::context);
}

TEST(chat_answer, a_repeated_conversation_gives_the_same_answer_and_the_caller_s_messages_stay_unchanged) {
  Speaker speaker({"<|channel|>final<|message|>yes<|return|>"});
  Session session(speaker);
  const Vocabulary& v = vocabulary();
  ChatConversation asked = kOpening;
  asked.messages.push_back({.role = ChatRole::user, .content = "a"});
  int tokens = 0;
  SessionOptions o = kGreedy;
  o.on_token = [&](int32_t) { return ++tokens > 0; };
  const ChatTurn one = answer(session, v.format, v.bpe, asked, o);
  session.forget();  // the speaker begins a line with a prompt of several tokens
  const ChatTurn two = answer(session, v.format, v.bpe, asked, o);
  EXPECT_EQ(one.parts, Parts{says("yes")});
  EXPECT_EQ(two.parts, one.parts);
  EXPECT_EQ(two.answer.tokens, one.answer.tokens);
  EXPECT_EQ(size_t(tokens), one.answer.tokens.size() + two.answer.tokens.size());
}

TEST(chat_answer, ids_pushed_one_by_one_become_the_same_parts) {
  const Vocabulary& v = vocabulary();
  std::string shown;
  ChatAnswer said(v.format, [&](const ChatPart&, std::string_view text) { shown += text; });
  const std::vector<int32_t> ids = v.ids("<|channel|>final<|message|>one \u2020<|end|><|start|>user<|message|>I say");
  size_t taken = 0;
  while (taken < ids.size() && said.push(ids[taken])) ++taken;
  EXPECT_LT(taken, ids.size());  // the turn of another role
  const ChatTurn turn = said.finish({.finish = Finish::length});
  EXPECT_EQ(turn.parts, Parts{says("one \u2020")});
  EXPECT_EQ(shown, "one \u2020");
  EXPECT_EQ(turn.answer.finish, Finish::stop);
  const std::vector<int32_t> stops = v.format.stop_ids();
  EXPECT_EQ(std::count(stops.begin(), stops.end(), v.tokens.end), 0);
  EXPECT_EQ(std::count(stops.begin(), stops.end(), v.tokens.call), 1);
}

// A small GPT-OSS, with 37 ids in place of the vocabulary's ids.
class Folded final : public HostDecoder {
 public:
  explicit Folded(std::unique_ptr<Decoder> inner) : HostDecoder(1), inner_(std::move(inner)), sequence_(*inner_) {}
  int64_t vocab() const override { return vocabulary().bpe.vocab_size(); }
  int64_t context() const override { return inner_->context(); }
  int64_t batch() const override { return inner_->batch(); }

 private:
  void clear(int) override { sequence_.rewind(0); }
  int64_t cached_length(int) const override { return sequence_.length(); }
  int64_t truncate(int, int64_t length) override { return sequence_.rewind(length); }
  void save_checkpoint(int) override { sequence_.checkpoint(); }
  void extend_slot(int, std::span<const int32_t> ids, Rows rows, const Take& take) override {
    const auto& t = vocabulary().tokens;
    bool answer_begins = false;
    for (const int32_t id : ids) {
      answer_begins = last_ == t.start;
      last_ = id;
    }
    std::vector<int32_t> folded(ids.begin(), ids.end());
    for (int32_t& id : folded) id %= int32_t(inner_->vocab());
    sequence_.extend(folded, rows, [&](int64_t at, const Tensor& logits) {
      std::vector<float> all(size_t(vocab()), -100.f);
      for (size_t i = 9; i < all.size(); ++i)  // no control token but <|message|> where an answer begins
        all[i] = logits.ptr<float>()[i % size_t(inner_->vocab())] - 1e-3f * float(i);
      if (answer_begins) all[size_t(t.message)] = 100;
      take(at, Tensor(all.data(), {1, vocab()}));
    });
  }

  std::unique_ptr<Decoder> inner_;
  Sequence sequence_;
  int32_t last_ = -1;
};

TEST(chat, turns_reuse_earlier_tokens_although_windows_have_moved_on) {
  const testing::RandomGptOss m;
  const auto decoder = [&] { return Folded(make_decoder(m.config, m.weights, {.context = 900, .batch = 8})); };
  Folded one = decoder();
  Chat chat(one, vocabulary().format, vocabulary().bpe, kOpening);
  SessionOptions o = kGreedy;
  o.tokens = 40;  // far beyond the windows
  for (const char* text : {"first", "second, longer than the first", "third"}) {
    const ChatConversation before = chat.conversation();
    const ChatTurn turn = chat.say(text, o);
    if (!before.messages.empty()) { EXPECT_GT(turn.answer.reused, 0) << text; }
    Folded other = decoder();
    Chat fresh(other, vocabulary().format, vocabulary().bpe, before);
    EXPECT_EQ(turn.parts.size(), 1u);
    EXPECT_EQ(fresh.say(text, o).answer.tokens, turn.answer.tokens) << text;
  }
}

}  // namespace
}  // namespace ingot
