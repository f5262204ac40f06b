#include "ingot/engines/serve/service.h"

#include <gtest/gtest.h>

#include <future>

#include "ingot/core/log.h"
#include "ingot/io/json.h"
#include "ingot/models/decoder.h"
#include "ingot/testing/testing.h"
#include "ingot/text/byte_bpe.h"

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

TEST(service, an_error_that_the_client_did_not_cause_tells_it_a_number_alone) {
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

// A choice that fails at once ends while later choices are still being submitted: a test for ThreadSanitizer.
TEST(service, choices_that_fail_before_the_last_is_there_give_one_error) {
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

TEST(service, a_long_name_of_an_ignored_field_is_kept_short) {
  const ApiRequest r = parse_api_request("{\"prompt\": \"x\", \"" + std::string(1000000, 'k') + "\": 1}", false);
  ASSERT_EQ(r.ignored.size(), 1u);
  EXPECT_LT(r.ignored[0].size(), 200u);
}

TEST(service, what_a_client_says_does_not_make_its_error_long) {
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

}  // namespace
}  // namespace ingot
