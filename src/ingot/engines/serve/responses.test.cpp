#include "ingot/engines/serve/responses.h"

#include <gtest/gtest.h>

#include "ingot/io/json.h"
#include "ingot/text/byte_tokenizer.test.h"

namespace ingot {
namespace {

std::vector<Json> events_of(const std::string& text) {
  std::vector<Json> events;
  for (size_t at = 0; at < text.size();) {
    const size_t data = text.find("\ndata: ", at), end = text.find("\n\n", at);
    events.push_back(parse_json(text.substr(data + 7, end - data - 7), "event"));
    EXPECT_EQ(text.substr(at, data - at), "event: " + events.back()["type"].get<std::string>());
    at = end + 2;
  }
  return events;
}

TEST(responses, the_last_event_holds_the_object_that_the_earlier_events_build) {
  ResponseWriter w("resp_x", "m", 5);
  std::string text = w.begin();
  text += w.add({.reasoning = "H"});
  text += w.add({.reasoning = "m"});
  text += w.add({.text = "Ye"});
  text += w.add({.text = "s"});
  text += w.add({.calls = {{.index = 0, .name = "f", .arguments = "{"}}});
  text += w.add({.calls = {{.index = 0, .arguments = "}"}}});
  text += w.add({.calls = {{.index = 1, .name = "g", .arguments = ""}}});
  text += w.end({.usage = {.prompt = 7, .cached = 2, .tokens = 3}});
  const std::vector<Json> events = events_of(text);
  std::vector<std::string> grown(4);
  int64_t added = 0, done = 0;
  for (size_t i = 0; i < events.size(); ++i) {
    EXPECT_EQ(events[i]["sequence_number"], i);
    const std::string type = events[i]["type"];
    if (type.ends_with(".delta"))
      grown[events[i]["output_index"].get<size_t>()] += events[i]["delta"].get<std::string>();
    if (type.ends_with("_text.done")) EXPECT_EQ(events[i]["text"], grown[events[i]["output_index"].get<size_t>()]);
    if (type.ends_with("arguments.done"))
      EXPECT_EQ(events[i]["arguments"], grown[events[i]["output_index"].get<size_t>()]);
    added += type == "response.output_item.added";
    done += type == "response.output_item.done";
  }
  EXPECT_EQ(grown, (std::vector<std::string>{"Hm", "Yes", "{}", ""}));
  EXPECT_EQ(added, 4);
  EXPECT_EQ(done, 4);
  EXPECT_EQ(events.front()["type"], "response.created");
  EXPECT_EQ(events.back()["type"], "response.completed");
  const Json r = events.back()["response"];
  EXPECT_EQ(r, parse_json(w.whole(), "whole"));
  EXPECT_EQ(r["status"], "completed");
  EXPECT_EQ(r["output"][0]["content"][0]["text"], "Hm");
  EXPECT_EQ(r["output"][1]["content"][0]["text"], "Yes");
  EXPECT_EQ(r["output"][2]["arguments"], "{}");
  EXPECT_EQ(r["output"][3]["name"], "g");
  EXPECT_EQ(r["usage"]["total_tokens"], 10);
  EXPECT_EQ(r["usage"]["input_tokens_details"]["cached_tokens"], 2);
  EXPECT_EQ(r["usage"]["input_tokens_details"]["cache_write_tokens"], 0);
  EXPECT_TRUE(events.front()["response"]["completed_at"].is_null());
  EXPECT_GT(r["completed_at"], r["created_at"]);
  EXPECT_EQ(r["output"][1]["content"][0]["logprobs"], Json::array());
}

TEST(responses, log_probabilities_are_in_the_events_and_in_the_item_where_the_request_asks_for_them) {
  const testing::ByteTokenizer tokenizer;
  const auto token = [](char c, double p) { return TokenInfo{.id = c, .logprobs = {.sampled = p, .top = {{c, p}}}}; };
  ResponseWriter w("resp_x", "m", 5, "{}", &tokenizer);
  std::string text = w.begin() + w.add({.reasoning = "Hm"});
  text += w.add({.text = "Ye", .tokens = {token('Y', -1), token('e', -2)}});
  text += w.add({.text = "s", .tokens = {token('s', -3)}});
  const std::vector<Json> events = events_of(text + w.end({}));
  const auto entry = [](const char* name, double p) {
    const Json plain = {{"token", name}, {"logprob", p}, {"bytes", Json::array({name[0]})}};
    Json with_top = plain;
    with_top["top_logprobs"] = Json::array({plain});
    return with_top;
  };
  const Json first = Json::array({entry("Y", -1), entry("e", -2)}), second = Json::array({entry("s", -3)}),
             all = Json::array({first[0], first[1], second[0]});
  std::vector<Json> deltas;
  for (const Json& e : events) {
    if (e["type"] == "response.output_text.delta") deltas.push_back(e["logprobs"]);
    if (e["type"] == "response.output_text.done") EXPECT_EQ(e["logprobs"], all);
    if (e["type"] == "response.content_part.done" && e["output_index"] == 1) EXPECT_EQ(e["part"]["logprobs"], all);
  }
  EXPECT_EQ(deltas, (std::vector<Json>{first, second}));
  EXPECT_EQ(events.back()["response"]["output"][1]["content"][0]["logprobs"], all);
}

TEST(responses, a_response_that_is_cut_or_fails_has_the_status_and_the_reason) {
  ResponseWriter cut("resp_x", "m", 5), failed("resp_y", "m", 5);
  cut.begin();
  cut.add({.text = "a"});
  const Json last = events_of(cut.end({.cut = true})).back();
  EXPECT_EQ(last["type"], "response.incomplete");
  EXPECT_EQ(last["response"]["incomplete_details"]["reason"], "max_output_tokens");
  EXPECT_EQ(last["response"]["output"][0]["status"], "incomplete");
  failed.begin();
  const Json end = events_of(failed.fail(ApiError(500, "no"))).back();
  EXPECT_EQ(end["type"], "response.failed");
  EXPECT_EQ(end["response"]["error"]["message"], "no");
}

TEST(responses, a_call_that_the_limit_cuts_is_incomplete_and_earlier_items_are_completed) {
  ResponseWriter w("resp_x", "m", 5);
  w.begin();
  w.add({.reasoning = "Hm"});
  w.add({.calls = {{.index = 0, .name = "f", .arguments = "{\"a\":"}}});
  const std::vector<Json> events = events_of(w.end({.cut = true, .usage = {.tokens = 9, .thought_tokens = 4}}));
  const Json output = events.back()["response"]["output"];
  EXPECT_EQ(output[0]["status"], "completed");
  EXPECT_EQ(output[1]["status"], "incomplete");
  for (const Json& e : events)
    if (e["type"] == "response.output_item.done") EXPECT_EQ(e["item"]["status"], "incomplete");
  EXPECT_EQ(events.back()["response"]["usage"]["output_tokens_details"]["reasoning_tokens"], 4);
}

}  // namespace
}  // namespace ingot
