#include "ingot/models/gpt_oss/decode/trace.h"

#include <gtest/gtest.h>

#include <map>

#include "ingot/core/check.h"
#include "ingot/io/json.h"

namespace ingot::gpt_oss_decode {
namespace {

// Two blocks, two layers: every stage of block b takes 10 + b us and then waits 1 - b us.
constexpr uint64_t kStart = 5'000'000'000'000'000'000;
std::vector<uint64_t> some_words(const megakernel::Trace& t) {
  std::vector<uint64_t> words;
  for (uint32_t b = 0; b < t.blocks; ++b) {
    for (uint32_t n = 0; n <= t.handoffs; ++n) {
      words.push_back(kStart + n * 11'000);
      words.push_back(kStart + n * 11'000 + 10'000 + b * 1'000);
    }
    for (uint32_t p = 0; p < t.extra; ++p) words.push_back(p == 1 ? 0 : 1'000'000 * (p + 1) + b);
  }
  return words;
}
megakernel::Trace some_trace() { return {.blocks = 2, .handoffs = 10, .extra = 6}; }

TEST(DecodeTrace, ASpanHasItsStagesTimesAndBytes) {
  const std::vector<StageSpan> spans = spans_of(some_trace(), some_words(some_trace()));
  ASSERT_EQ(spans.size(), 22u);
  const StageSpan& up = spans[11 + 5 + 3];  // block 1, layer 1
  EXPECT_EQ(std::tuple(up.block, up.layer, std::string(stage_name(up.stage))), std::tuple(1u, 1u, "gate and up"));
  EXPECT_EQ(up.begin_ns, kStart + 88'000);
  EXPECT_EQ(up.done_ns, kStart + 99'000);
  EXPECT_EQ(up.on_ns, kStart + 99'000);
  EXPECT_EQ(up.bytes, 4'000'001u);
  EXPECT_EQ(spans[1].bytes, 0u) << "attention multiplies by no weights";
  EXPECT_EQ(std::tuple(std::string(stage_name(spans[10].stage)), spans[10].bytes, spans[10].on_ns),
            std::tuple("head", 6'000'000u, kStart + 120'000));
}

TEST(DecodeTrace, TimesThatAreMissingOrRunBackwardsAreRefused) {
  std::vector<uint64_t> words = some_words(some_trace());
  const auto refused = [&] { EXPECT_THROW(spans_of(some_trace(), words), Error); };
  words[7] = 0;
  refused();
  words = some_words(some_trace());
  std::swap(words[40], words[41]);
  refused();
  words = some_words(some_trace());
  words.pop_back();
  refused();
}

// Every event lies within the one that is open on its row, and what a token's row shows adds up.
TEST(DecodeTrace, TheFileIsJsonWhoseEventsNest) {
  const auto spans = spans_of(some_trace(), some_words(some_trace()));
  const Json file = parse_json(perfetto_json(spans, "GPT-OSS \"120b\""), "trace");
  std::map<int, std::vector<double>> open;  // by row: the ends of what is open
  std::map<std::string, int> count;
  for (const auto& e : file.at("traceEvents")) {
    if (e.at("ph") == "M") {
      if (e.at("name") == "process_name") EXPECT_EQ(e.at("args").at("name"), "GPT-OSS \"120b\"");
      continue;
    }
    ASSERT_EQ(e.at("ph"), "X");
    const double begin = e.at("ts"), end = begin + double(e.at("dur"));
    constexpr double kRounding = 1e-6;  // us
    auto& ends = open[e.at("tid")];
    while (!ends.empty() && ends.back() <= begin + kRounding) ends.pop_back();
    if (e.at("name") != "token") {
      ASSERT_FALSE(ends.empty());
      EXPECT_LE(end, ends.back() + kRounding) << e.dump();
    }
    ends.push_back(end);
    ++count[e.at("name")];
    if (e.at("name") == "gate and up" && e.at("tid") == 0) {
      EXPECT_EQ(e.at("args").at("bytes"), 4'000'000);
      EXPECT_DOUBLE_EQ(e.at("args").at("GB/s"), 400);
      EXPECT_DOUBLE_EQ(e.at("args").at("wait_us"), 1);
    }
  }
  const std::map<std::string, int> want = {{"token", 2},  {"layer 0", 2},   {"layer 1", 2},     {"qkv", 4},
                                           {"output", 4}, {"attention", 4}, {"gate and up", 4}, {"down", 4},
                                           {"head", 2},   {"waiting", 10}};
  EXPECT_EQ(count, want);
}

}  // namespace
}  // namespace ingot::gpt_oss_decode
