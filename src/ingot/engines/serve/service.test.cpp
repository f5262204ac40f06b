#include "ingot/engines/serve/service.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <future>

#include "ingot/core/log.h"
#include "ingot/io/json.h"
#include "ingot/models/fake_decoder.test.h"
#include "ingot/testing/testing.h"
#include "ingot/text/byte_bpe.h"
#include "ingot/text/chat/harmony_bytes.test.h"

namespace ingot {
namespace {

// Answers with consecutive letters, then fails according to `error`.
class Faulty : public Decoder {
 public:
  explicit Faulty(std::exception_ptr error, int64_t after) : Decoder(2), error_(error), after_(after) {}
  int64_t vocab() const override { return 256; }
  int64_t context() const override { return 64; }
  int64_t batch() const override { return 8; }

 protected:
  void clear(int slot) override { lengths_[slot] = 0; }
  int64_t cached_length(int slot) const override { return lengths_[slot]; }
  int64_t truncate(int slot, int64_t length) override { return lengths_[slot] = length; }
  void append(int slot, std::span<const int32_t> ids, Rows, const Take&) override {
    lengths_[slot] += int64_t(ids.size());
  }
  void feed(const PendingToken& pending) override { ++lengths_[pending.next.slot]; }
  std::vector<SlotSampled> sample_tokens(std::span<const SlotSample> samples) override {
    std::vector<SlotSampled> sampled;
    for (const SlotSample& s : samples) sampled.push_back({.token = letter(s)});
    return sampled;
  }

 private:
  SampledToken letter(const SlotSample& s) const {
    if (int64_t(s.step) >= after_) std::rethrow_exception(error_);
    SampledToken d{.token = int32_t('a' + s.step)};
    // The three likeliest ids: two bytes that are not a character, and a letter.
    if (s.options->logprobs == 3) d.logprobs = {.sampled = -1, .top = {{0xff, -0.5}, {0xfe, -2}, {'a', -3}}};
    return d;
  }

 private:
  const std::exception_ptr error_;
  const int64_t after_;
  int64_t lengths_[2] = {};
};

std::shared_ptr<const ByteBpe> bytes() {
  std::vector<std::string> tokens;
  for (int b = 0; b < 256; ++b) tokens.emplace_back(1, char(b));
  return std::make_shared<ByteBpe>(ByteBpe({.pattern = WordPattern::o200k, .tokens = tokens}));
}
std::unique_ptr<Service> service(std::exception_ptr error, int64_t after) {
  OpenedModel model;
  model.decoder = std::make_unique<Faulty>(error, after);
  const auto bpe = bytes();
  return std::make_unique<Service>(std::move(model), Vocabulary{.tokenizer = bpe, .bpe = bpe.get()},
                                   ServiceOptions{.name = "tiny"});
}

struct Heard {
  std::string events;
  std::promise<std::pair<int, std::string>> end;
  ApiAnswer answer() {
    return {.event = [this](std::string e) { events += e; },
            .end =
                [this](int status, std::string body) {
                  end.set_value({status, body});
                }};
  }
};
std::pair<int, std::string> ask(Service& s, Heard& heard, const std::string& more) {
  s.ask(parse_api_request(R"({"prompt": "x", "max_tokens": 9)" + more + "}", false), "", heard.answer());
  return heard.end.get_future().get();
}

TEST(service, an_internal_error_shows_the_client_only_a_number) {
  const std::string secret = "/home/somebody/model.bin: read at 0x7ffe12345678 failed after 'another one's text'";
  for (const auto& error : {std::make_exception_ptr(Error(ErrorCode::io, secret)),
                            std::make_exception_ptr(std::runtime_error(secret)), std::make_exception_ptr(7)}) {
    const auto s = service(error, 3);
    Heard whole, stream;
    const auto [status, body] = ask(*s, whole, "");
    EXPECT_EQ(status, 500);
    for (const std::string& said : {body, (ask(*s, stream, R"(, "stream": true)"), stream.events)}) {
      EXPECT_NE(said.find("the request failed; the server's log says why under "), std::string::npos) << said;
      for (const char* part : {"somebody", "0x7ffe", "another", "input/output"})
        EXPECT_EQ(said.find(part), std::string::npos) << said;
    }
    // one error event, and no event after it
    EXPECT_EQ(stream.events.rfind("data: {\"error\""), stream.events.rfind("data: "));
    // The next request is answered normally.
    Heard again;
    s->ask(parse_api_request(R"({"prompt": "x", "max_tokens": 3})", false), "", again.answer());
    const auto [good, text] = again.end.get_future().get();
    EXPECT_EQ(good, 200);
    EXPECT_EQ(parse_json(text, "answer")["choices"][0]["text"], "abc");
  }
}

TEST(service, ids_that_the_model_lacks_and_prompts_without_tokens_are_refused_by_the_field_s_name) {
  const auto s = service(std::make_exception_ptr(std::runtime_error("no")), 5);
  for (const auto& [body, param, message] : std::vector<std::array<std::string, 3>>{
           {R"("prompt": "x", "logit_bias": {"255": 1, "256": 1})", "logit_bias", "found id 256, expected 0 to 255"},
           {R"("prompt": "x", "stop_token_ids": [255, 256])", "stop_token_ids", "found id 256, expected 0 to 255"},
           {R"("prompt": [1, 256])", "prompt", "found id 256, expected 0 to 255"},
           {R"("prompt": [1, 256], "echo": true)", "prompt", "found id 256, expected 0 to 255"},
           {R"("prompt": [[1], [2, 900]])", "prompt[1]", "found id 900, expected 0 to 255"},
           {R"("prompt": "")", "prompt", "found an empty prompt, expected at least one token"},
           {R"("prompt": ["x", ""])", "prompt[1]", "found an empty prompt, expected at least one token"}}) {
    Heard heard;
    try {
      s->ask(parse_api_request("{\"max_tokens\": 3, " + body + "}", false), "", heard.answer());
      ADD_FAILURE() << body << ": accepted";
    } catch (const ApiError& e) {
      EXPECT_EQ(e.status, 400) << body;
      EXPECT_EQ(e.param, param) << body;
      EXPECT_EQ(e.what(), param + ": " + message) << body;
    }
  }
}

TEST(service, an_answer_ends_before_the_token_of_a_stop_id) {
  const auto s = service(std::make_exception_ptr(std::runtime_error("no")), 5);
  Heard whole, stream;
  const auto [status, body] = ask(*s, whole, R"(, "stop_token_ids": [120, 100], "logprobs": 0)");  // x and d
  EXPECT_EQ(status, 200) << body;
  const Json answer = parse_json(body, "answer"), choice = answer["choices"][0];
  EXPECT_EQ(choice["text"], "abc");
  EXPECT_EQ(choice["finish_reason"], "stop");
  EXPECT_EQ(choice["logprobs"]["tokens"], (Json{"a", "b", "c"}));
  EXPECT_EQ(answer["usage"]["completion_tokens"], 3);
  ask(*s, stream, R"(, "stop_token_ids": [100], "stream": true)");
  EXPECT_NE(stream.events.find("\"finish_reason\":\"stop\""), std::string::npos) << stream.events;
  EXPECT_EQ(stream.events.find("\"text\":\"d\""), std::string::npos) << stream.events;
}

// A choice that fails at once ends while later choices are still being submitted: a test for ThreadSanitizer.
TEST(service, choices_that_fail_before_the_last_choice_is_complete_give_one_error) {
  const auto s = service(std::make_exception_ptr(Error(ErrorCode::io, "no")), 0);
  for (int i = 0; i < 200; ++i) {
    Heard heard;
    EXPECT_EQ(ask(*s, heard, R"(, "n": 8)").first, 500);
  }
  EXPECT_TRUE(s->drain(60));
}

TEST(service, names_of_likely_tokens_are_different_also_where_bytes_are_no_characters) {
  const auto s = service(std::make_exception_ptr(7), 9);
  Heard heard;
  const auto [status, body] = ask(*s, heard, R"(, "logprobs": 3)");
  ASSERT_EQ(status, 200) << body;
  // a repeated name would be refused
  const Json likely = parse_json(body, "answer")["choices"][0]["logprobs"]["top_logprobs"][0];
  EXPECT_EQ(likely, (Json{{"\uFFFD", -0.5}, {"a", -3}}));
}

// All bytes are equally likely.
class Uniform final : public testing::FakeDecoder {
 public:
  Uniform() : FakeDecoder({.vocab = 256, .context = 64, .slots = 2}) {}

 private:
  void extend_slot(int slot, std::span<const int32_t> ids, Rows, const Take& take) override {
    append_ids(slot, ids);
    std::vector<float> logits(256, 0.f);
    take(int64_t(fed(slot).size()) - 1, Tensor(logits.data(), {1, 256}));
  }
};

std::unique_ptr<Service> uniform_service() {
  OpenedModel model;
  model.decoder = std::make_unique<Uniform>();
  const auto bpe = bytes();
  return std::make_unique<Service>(std::move(model), Vocabulary{.tokenizer = bpe, .bpe = bpe.get()},
                                   ServiceOptions{.name = "uniform"});
}

TEST(service, choices_have_random_numbers_of_their_own_which_the_seed_gives_again) {
  const auto s = uniform_service();
  const auto texts = [&](const std::string& seed) {
    Heard heard;
    const auto [status, body] = ask(*s, heard, R"(, "n": 2, "temperature": 1, "seed": )" + seed);
    EXPECT_EQ(status, 200) << body;
    const Json choices = parse_json(body, "answer")["choices"];
    return std::pair(choices[0]["text"], choices[1]["text"]);
  };
  const auto first = texts("5");
  EXPECT_NE(first.first, first.second);
  EXPECT_EQ(texts("5"), first);
  EXPECT_NE(texts("6").first, first.first);
}

TEST(service, places_of_tokens_behind_an_echo_count_from_the_prompt) {
  const auto s = uniform_service();
  Heard heard;
  const auto [status, body] = ask(*s, heard, R"(, "echo": true, "logprobs": 0)");
  ASSERT_EQ(status, 200) << body;
  const Json places = parse_json(body, "answer")["choices"][0]["logprobs"]["text_offset"];
  EXPECT_EQ(places[0], 0);
  EXPECT_EQ(places[1], 1);
  // In characters, as OpenAI's clients index a text.
  Heard wide;
  s->ask(parse_api_request(R"({"prompt": "\u65e5x", "max_tokens": 1, "echo": true, "logprobs": 0})", false), "",
         wide.answer());
  const Json of_wide = parse_json(wide.end.get_future().get().second, "answer")["choices"][0]["logprobs"];
  EXPECT_EQ(of_wide["text_offset"], (Json{0, 0, 0, 1, 2}));
}

// A format that refuses functions, calls and results.
class NoFunctions final : public ChatFormat {
 public:
  const char* name() const override { return "none"; }
  std::vector<std::string> efforts() const override { return {}; }
  std::vector<int32_t> prompt(const ChatConversation& c) const override {
    fail(ErrorCode::usage, "found ", c.functions.empty() ? "a result" : "functions");
  }
  std::vector<int32_t> stop_ids() const override { return {}; }
  bool is_control(int32_t) const override { return false; }
  std::unique_ptr<ChatParser> parser(std::vector<std::string>) const override { return nullptr; }
  Grammar::Rule answer_rule(Grammar&, const ChatAnswerForm&) const override { return {}; }
  std::vector<int32_t> grammar_controls() const override { return {}; }
};

TEST(service, a_request_that_the_chat_format_refuses_names_the_field) {
  OpenedModel model;
  model.decoder = std::make_unique<Uniform>();
  const auto bpe = bytes();
  Service s(std::move(model), {.tokenizer = bpe, .bpe = bpe.get(), .chat = std::make_shared<NoFunctions>()},
            ServiceOptions{.name = "uniform"});
  const auto param = [&](const ApiRequest& r) {
    Heard heard;
    try {
      s.ask(r, "", heard.answer());
    } catch (const ApiError& e) {
      EXPECT_EQ(e.status, 400);
      return e.param;
    }
    return std::string("accepted");
  };
  const std::string call = R"({"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}, )",
                    result = R"({"role": "tool", "tool_call_id": "c", "content": "x"})";
  EXPECT_EQ(param(parse_api_request(R"({"messages": [{"role": "user", "content": "a"}],
      "tools": [{"type": "function", "function": {"name": "f"}}]})",
                                    true)),
            "tools");
  EXPECT_EQ(param(parse_api_request("{\"messages\": [" + call + result + "]}", true)), "messages");
  EXPECT_EQ(param(parse_responses_request(R"({"input": [
      {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
      {"type": "function_call_output", "call_id": "c", "output": "x"}]})")),
            "input");
}

TEST(histogram, a_value_counts_up_to_the_first_bound_that_is_not_below) {
  Histogram h;
  for (const double seconds : {0.0, 0.05, 0.0501, 1000.0}) h.add(seconds);
  const std::string text = h.text("t", "help");
  for (const char* line :
       {"t_bucket{le=\"0.001\"} 1\n", "t_bucket{le=\"0.025\"} 1\n", "t_bucket{le=\"0.05\"} 2\n",
        "t_bucket{le=\"0.1\"} 3\n", "t_bucket{le=\"600\"} 3\n", "t_bucket{le=\"+Inf\"} 4\n", "t_count 4\n"})
    EXPECT_NE(text.find(line), std::string::npos) << line << text;
}

TEST(service, a_long_name_of_an_ignored_field_is_kept_short) {
  const ApiRequest r = parse_api_request("{\"prompt\": \"x\", \"" + std::string(1000000, 'k') + "\": 1}", false);
  ASSERT_EQ(r.ignored.size(), 1u);
  EXPECT_LT(r.ignored[0].size(), 200u);
}

TEST(service, the_text_of_a_request_does_not_make_its_error_long) {
  for (const std::string& name : {std::string(1000000, 'k'), std::string(1000000, '\x01')}) {
    try {
      parse_api_request("{\"prompt\": \"x\", " + show_json(OrderedJson(name)) + ": 1}", false, {.strict_fields = true});
      ADD_FAILURE() << "it was read";
    } catch (const ApiError& e) { EXPECT_LT(to_json(e).size(), 8000u); }
    try {
      parse_api_request("{\"prompt\": \"" + name, false);
      ADD_FAILURE() << "it was read";
    } catch (const ApiError& e) { EXPECT_LT(to_json(e).size(), 8000u); }
  }
}

// --- drafts across the end of thoughts

using Ids = std::vector<int32_t>;

// Bytes, and control tokens by their names.
Ids harmony_ids(const std::string& text) {
  Ids ids;
  for (size_t at = 0; at < text.size();) {
    const auto* const control =
        std::find_if(std::begin(testing::kHarmonyNames), std::end(testing::kHarmonyNames),
                     [&](const std::string& name) { return text.compare(at, name.size(), name) == 0; });
    const bool is_byte = control == std::end(testing::kHarmonyNames);
    ids.push_back(is_byte ? int32_t(uint8_t(text[at])) : 256 + int32_t(control - testing::kHarmonyNames));
    at += is_byte ? 1 : std::string(*control).size();
  }
  return ids;
}

// A model whose likeliest answer is a script. The other logits depend on all tokens before, so that a token that was
// drafted and not accepted changes later answers if the slot keeps it.
class Scripted final : public testing::FakeDecoder {
 public:
  explicit Scripted(Ids script)
      : FakeDecoder({.vocab = 256 + int64_t(std::size(testing::kHarmonyNames)), .context = 2000, .batch = 64}),
        script_(std::move(script)) {}
  int64_t draft_rows() const override { return 8; }

 private:
  void extend_slot(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) override {
    const int64_t begin = int64_t(fed().size()), n = int64_t(ids.size()), V = vocab();
    std::vector<float> logits;
    for (const int32_t& id : ids) {
      append_ids(slot, {&id, 1});
      const int32_t likeliest = scripted();
      uint32_t hash = 1;
      for (const int32_t t : fed()) hash = (hash ^ uint32_t(t)) * 16777619u;
      for (int32_t v = 0; v < V; ++v)
        logits.push_back(v == likeliest ? 20 : float(((hash ^ uint32_t(v)) * 2654435761u) >> 16) * 0x1p-15f);
    }
    const Tensor all(logits.data(), {n, V});
    rows == Rows::all ? take(begin, all) : take(begin + n - 1, all.slice(0, n - 1, n));
  }
  void extend_draft(int slot, std::span<const int32_t> ids, const Take& take) override {
    extend_slot(slot, ids, Rows::all, take);
  }
  // The token of the script after all tokens; -1: the script has ended. The answer begins after the first turn of the
  // assistant.
  int32_t scripted() const {
    static const Ids turn = harmony_ids("<|start|>assistant");
    const auto begin = std::search(fed().begin(), fed().end(), turn.begin(), turn.end());
    const size_t at = size_t(fed().end() - begin);
    return at >= turn.size() && at - turn.size() < script_.size() ? script_[at - turn.size()] : -1;
  }
  Ids script_;
};

// Guesses the tokens of a text from the place at which the answer is. The first tokens appended are the prompt.
class TextDrafter final : public draft::Drafter {
 public:
  explicit TextDrafter(Ids text) : text_(std::move(text)) {}
  void append(std::span<const int32_t> ids) override {
    if (prompt_ < 0) prompt_ = int64_t(ids.size());
    length_ += int64_t(ids.size());
  }
  void truncate(int64_t length) override { length_ = length; }
  int64_t length() const override { return length_; }
  draft::Draft draft(int64_t most) const override {
    const int64_t begin = std::min(length_ - prompt_, int64_t(text_.size())),
                  end = std::min(begin + most, int64_t(text_.size()));
    return {.tokens = Ids(text_.begin() + begin, text_.begin() + end)};
  }

 private:
  Ids text_;
  int64_t prompt_ = -1, length_ = 0;
};

struct ChatAnswer {
  Json choices;
  int64_t accepted = 0;
  std::string events;  // of a stream, which has no choices
};
// Without `guess` no drafts.
ChatAnswer chat(const std::string& script, const std::string& more, const std::string& guess, int64_t most) {
  const auto bpe = testing::harmony_bytes();
  OpenedModel model;
  model.decoder = std::make_unique<Scripted>(harmony_ids(script));
  ServiceOptions options{.name = "scripted"};
  const ApiRequest request = parse_api_request(
      R"({"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 120, "seed": 1)" + more + "}",
      true);
  ChatAnswer answer;
  if (!guess.empty()) {
    options.scheduling.drafted = DraftWhich::all;
    options.scheduling.draft = {.make = {}, .most = most, .step_costs = std::vector<double>(8, 1.0)};
    options.scheduling.draft.make = [&](Ids) { return std::make_unique<TextDrafter>(harmony_ids(guess)); };
  }
  Service s(std::move(model),
            Vocabulary{.tokenizer = bpe, .bpe = bpe.get(), .chat = std::make_shared<HarmonyFormat>(bpe, "test")},
            options);
  Heard heard;
  s.ask(request, "", heard.answer());
  const auto [status, body] = heard.end.get_future().get();
  EXPECT_EQ(status, 200) << body;
  answer.events = heard.events;
  if (request.stream) return answer;
  const Json all = parse_json(body, "answer");
  answer.choices = all["choices"];
  if (all.contains("timings")) answer.accepted = all["timings"].value("draft_n_accepted", int64_t(0));
  return answer;
}

TEST(service, an_answer_without_its_thoughts_is_otherwise_the_same) {
  const std::string script =
      "<|channel|>analysis<|message|>Hm, so.<|end|><|start|>assistant<|channel|>final<|message|>Yes, 12.<|return|>";
  for (const std::string& logprobs : {std::string(), std::string(R"(, "logprobs": true)")}) {
    Json expected = chat(script, logprobs, "", 0).choices;
    EXPECT_EQ(expected[0]["message"]["reasoning_content"], "Hm, so.");
    EXPECT_EQ(expected[0]["message"]["content"], "Yes, 12.");
    expected[0]["message"].erase("reasoning_content");
    for (const std::string more : {R"(, "include_reasoning": false)", R"(, "reasoning": {"exclude": true})"}) {
      EXPECT_EQ(chat(script, logprobs + more, "", 0).choices, expected);
      const std::string stream = chat(script, logprobs + more + R"(, "stream": true)", "", 0).events;
      EXPECT_EQ(stream.find("reasoning"), std::string::npos) << stream;
      EXPECT_EQ(stream.find(R"("delta":{},"logprobs":null,"finish_reason":null)"), std::string::npos) << stream;
      EXPECT_NE(stream.find(R"("delta":{"content":"Y)"), std::string::npos) << stream;
    }
    EXPECT_NE(chat(script, logprobs + R"(, "stream": true)", "", 0).events.find("reasoning_content"),
              std::string::npos);
  }
}

// The end of the thoughts falls on every row of a step, and drafts go on with the final text or with further thoughts.
TEST(service, thoughts_that_end_inside_a_draft_are_split_and_held_to_a_schema_as_without_drafts) {
  const std::string thoughts = "<|channel|>analysis<|message|>Hm, so.",
                    turn = "<|end|><|start|>assistant<|channel|>final<|message|>",
                    schema =
                        R"(, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": true,
                      "schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
                                 "additionalProperties": false}}})",
                    object = "{\"a\":12}", chatter = "Sure: 7.";
  const auto answer_of = [&](const std::string& text) { return thoughts + turn + text + "<|return|>"; };
  struct Case {
    std::string script;   // the text that the model is biased to answer with
    std::string more;     // further fields of the request
    std::string content;  // the expected content of the answer; empty: not compared
  };
  for (const Case& c : {Case{answer_of(chatter), "", chatter},
                        {answer_of(object), schema, object},
                        {answer_of(chatter), schema + R"(, "temperature": 0)", ""},
                        {answer_of(object), schema + R"(, "logprobs": true, "top_logprobs": 2)", object}}) {
    const ChatAnswer want = chat(c.script, c.more, "", 0);
    const Json message = want.choices[0]["message"];
    EXPECT_EQ(message["reasoning_content"], "Hm, so.") << c.script;
    if (!c.content.empty()) EXPECT_EQ(message["content"], c.content);
    for (const std::string& guess : {c.script, thoughts + " And yet more thoughts, without an end", answer_of(chatter),
                                     answer_of(object), thoughts + "<|end|><|return|>"})
      for (const int64_t most : {1, 2, 3, 4, 5, 6, 7}) {
        const ChatAnswer found = chat(c.script, c.more, guess, most);
        EXPECT_EQ(found.choices, want.choices) << c.script << " by " << guess << ", drafts of " << most;
        EXPECT_GT(found.accepted, 5);
      }
  }
}

}  // namespace
}  // namespace ingot
