#include "ingot/engines/serve/completions.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ingot/io/json.h"
#include "ingot/text/byte_tokenizer.test.h"

namespace ingot {
namespace {

const testing::ByteTokenizer kTokenizer;

ApiRequest request_of(const std::string& body, bool chat) { return parse_api_request(body, chat); }
CompletionWriter writer_of(const ApiRequest& r) { return {r, kTokenizer, "id-1", "model", "1.2", 1234}; }
// The JSON of an event.
Json json_of(const std::string& event) {
  EXPECT_TRUE(event.starts_with("data: ") && event.ends_with("\n\n")) << event;
  return parse_json(event.substr(6, event.size() - 8), "event");
}

const char kChat[] = R"({"messages": [{"role": "user", "content": "Hi"}])";

TEST(completions, a_logprob_of_minus_infinity_is_the_number_that_the_api_has_for_it) {
  const TokenInfo token{.id = 'a', .logprobs = {.sampled = -HUGE_VAL, .top = {{'b', -0.5}, {'c', -HUGE_VAL}}}};
  const ApiRequest chat = request_of(std::string(kChat) + R"(, "logprobs": true, "top_logprobs": 2})", true);
  const Json of_chat = json_of(writer_of(chat).add(0, {.text = "a", .tokens = {token}}));
  const Json& entry = of_chat["choices"][0]["logprobs"]["content"][0];
  EXPECT_EQ(entry["logprob"], -9999.0);
  EXPECT_EQ(entry["bytes"], Json::array({'a'}));
  EXPECT_EQ(entry["top_logprobs"][0]["logprob"], -0.5);
  EXPECT_EQ(entry["top_logprobs"][1]["logprob"], -9999.0);
  const ApiRequest text = request_of(R"({"prompt": "x", "logprobs": 2})", false);
  const Json of_text = json_of(writer_of(text).add(0, {.text = "a", .tokens = {token}}));
  EXPECT_EQ(of_text["choices"][0]["logprobs"]["token_logprobs"][0], -9999.0);
  EXPECT_EQ(of_text["choices"][0]["logprobs"]["top_logprobs"][0]["c"], -9999.0);
}

TEST(completions, usage_counts_a_prompt_once_for_its_choices_and_the_tokens_of_all_choices) {
  const ApiRequest r = request_of(std::string(kChat) + R"(, "n": 2})", true);
  std::vector<CompletionChoice> choices(2);
  for (CompletionChoice& c : choices) {
    c.answer.text = "answer";
    c.outcome.prompt = 11, c.outcome.reused = 4, c.outcome.tokens = 5, c.outcome.token_seconds = 2;
    c.thought_tokens = 3;
  }
  choices[1].outcome.finish = Finish::context;
  choices[0].outcome.prompt_seconds = 3.5;
  const Json all = parse_json(writer_of(r).whole(choices), "answer");
  EXPECT_EQ(all["object"], "chat.completion");
  EXPECT_EQ(all["usage"]["prompt_tokens"], 11);
  EXPECT_EQ(all["usage"]["prompt_tokens_details"]["cached_tokens"], 4);
  EXPECT_EQ(all["usage"]["completion_tokens"], 10);
  EXPECT_EQ(all["usage"]["total_tokens"], 21);
  EXPECT_EQ(all["usage"]["completion_tokens_details"]["reasoning_tokens"], 6);
  EXPECT_EQ(all["timings"]["predicted_per_second"],
            (10 - 2) / 2.0);  // the first token of a choice comes with the prompt
  EXPECT_EQ(all["timings"]["predicted_per_token_ms"], 250.0);
  EXPECT_EQ(all["timings"]["prompt_n"], 7);
  EXPECT_EQ(all["timings"]["prompt_ms"], 3500.0);
  EXPECT_EQ(all["timings"]["prompt_per_second"], 2.0);
  EXPECT_EQ(all["timings"]["prompt_per_token_ms"], 500.0);
  EXPECT_EQ(all["choices"][1]["index"], 1);
  EXPECT_EQ(all["choices"][1]["finish_reason"], "length");
}

TEST(completions, usage_counts_the_tokens_of_every_prediction_also_of_an_empty_one) {
  const auto details = [](const std::string& more) {
    const ApiRequest r = request_of(kChat + more + "}", true);
    return parse_json(writer_of(r).whole({CompletionChoice{}}), "answer")["usage"]["completion_tokens_details"];
  };
  EXPECT_FALSE(details("").contains("accepted_prediction_tokens"));
  const Json empty = details(R"(, "prediction": {"type": "content", "content": ""})");
  EXPECT_EQ(empty.value("accepted_prediction_tokens", -1), 0);
  EXPECT_EQ(empty.value("rejected_prediction_tokens", -1), 0);
}

TEST(completions, rates_of_an_answer_without_time_or_tokens_are_zero) {
  const ApiRequest r = request_of(R"({"prompt": "x", "echo": true, "max_tokens": 0})", false);
  std::vector<CompletionChoice> choices(1);
  choices[0].outcome.prompt = choices[0].outcome.reused = 4;
  const Json timings = parse_json(writer_of(r).whole(choices), "answer")["timings"];
  for (const char* name :
       {"prompt_per_token_ms", "prompt_per_second", "predicted_per_token_ms", "predicted_per_second"})
    EXPECT_EQ(timings[name], 0) << name;
}

TEST(completions, an_answer_of_calls_alone_has_no_content) {
  const ApiRequest r = request_of(std::string(kChat) + "}", true);
  std::vector<CompletionChoice> choices(1);
  choices[0].calls = {{.index = 0, .name = "f", .arguments = "{}", .id = "x"}};
  choices[0].outcome.finish = Finish::stop, choices[0].called = true;
  const Json choice = parse_json(writer_of(r).whole(choices), "answer")["choices"][0];
  EXPECT_TRUE(choice["message"]["content"].is_null());
  EXPECT_EQ(choice["message"]["tool_calls"][0]["function"]["name"], "f");
  EXPECT_EQ(choice["finish_reason"], "tool_calls");
}

TEST(completions, a_stream_has_usage_only_on_request_and_ends_with_done) {
  for (const bool usage : {false, true}) {
    const ApiRequest r = request_of(R"({"prompt": "x", "stream": true)" +
                                        std::string(usage ? R"(, "stream_options": {"include_usage": true}})" : "}"),
                                    false);
    const CompletionWriter w = writer_of(r);
    EXPECT_EQ(w.begin(0), "");
    EXPECT_EQ(json_of(w.add(0, {.text = "a"}))["choices"][0]["text"], "a");
    EXPECT_EQ(json_of(w.end(0, Finish::stop, false))["choices"][0]["finish_reason"], "stop");
    const std::string end = w.finish({CompletionChoice{}});
    EXPECT_TRUE(end.ends_with("data: [DONE]\n\n"));
    EXPECT_EQ(end.find("\"usage\"") != std::string::npos, usage) << end;
  }
}

}  // namespace
}  // namespace ingot
