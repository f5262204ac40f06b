#include "ingot/models/decode/model/trace.h"

#include <gtest/gtest.h>

#include <map>

#include "ingot/core/check.h"
#include "ingot/io/json.h"

namespace ingot::decode {
namespace {

// Two blocks, two layers: every stage of block b takes 10 + b us and then waits 1 - b us.
constexpr uint64_t kStart = 5'000'000'000'000'000'000;
std::vector<uint64_t> some_words(const megakernel::Trace& t) {
  std::vector<uint64_t> words;
  for (uint32_t b = 0; b < t.blocks; ++b) {
    for (uint32_t n = 0; n <= t.grid_barriers; ++n) {
      words.push_back(kStart + n * 11'000);
      words.push_back(kStart + n * 11'000 + 10'000 + b * 1'000);
    }
    for (uint32_t p = 0; p < t.extra; ++p) words.push_back(p == 1 ? 0 : 1'000'000 * (p + 1) + b);
  }
  return words;
}
megakernel::Trace some_trace() { return {.blocks = 2, .grid_barriers = 10, .extra = 6}; }

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

// Every event lies within the event that is open on its row, and the events of a token add up to its time.
TEST(DecodeTrace, TheFileIsJsonWhoseEventsNest) {
  const auto spans = spans_of(some_trace(), some_words(some_trace()));
  const Json file = parse_json(perfetto_json(spans, "GPT-OSS \"120b\""), "trace");
  std::map<int, std::vector<double>> open;  // by row: the ends of the open events
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

// --- several GPUs

// As some_words(), and for each exchange: the part is sent 3 us before the end of the stage, and all parts arrive 1 us
// before the end.
std::vector<uint64_t> words_with_exchanges(const megakernel::Trace& t) {
  const megakernel::Trace plain = some_trace();
  const std::vector<uint64_t> from = some_words(plain);
  std::vector<uint64_t> words;
  for (uint32_t b = 0; b < t.blocks; ++b) {
    const auto row = std::span(from).subspan(size_t(b) * plain.words_of_block(), plain.words_of_block());
    words.insert(words.end(), row.begin(), row.end());
    for (uint32_t layer = 0; layer < 2; ++layer)
      for (const uint32_t stage : {2u, 4u}) {
        const uint64_t done = row[2 * (5 * layer + stage) + 1];
        words.push_back(done - 3'000), words.push_back(done - 1'000);
      }
  }
  return words;
}
megakernel::Trace shared_trace() { return {.blocks = 2, .grid_barriers = 10, .extra = 6 + 2 * 4}; }

TEST(DecodeTrace, StagesWhosePartsGpusAddUpHaveTheExchange) {
  const auto spans = spans_of(shared_trace(), words_with_exchanges(shared_trace()));
  ASSERT_EQ(spans.size(), 22u);
  for (const StageSpan& s : spans) {
    const bool exchanges = s.stage == 2 || s.stage == 4;
    EXPECT_EQ(s.sent_ns, exchanges ? s.done_ns - 3'000 : 0);
    EXPECT_EQ(s.came_ns, exchanges ? s.done_ns - 1'000 : 0);
  }
  std::vector<uint64_t> words = words_with_exchanges(shared_trace());
  words[size_t(shared_trace().stamps()) + 6] = 0;  // the first output's
  EXPECT_THROW(spans_of(shared_trace(), words), Error);
}

// The clock of the second GPU is ahead by a minute; the second GPU sends at the same time as the first and waits as
// long.
TEST(DecodeTrace, GpusWithDifferentClocksAreShownByOneClock) {
  constexpr int64_t kAhead = 60'000'000'000;
  const auto one = spans_of(shared_trace(), words_with_exchanges(shared_trace()));
  auto other = one;
  for (StageSpan& s : other)
    for (uint64_t* t : {&s.begin_ns, &s.done_ns, &s.on_ns, &s.sent_ns, &s.came_ns})
      if (*t > 0) *t += uint64_t(kAhead);
  EXPECT_EQ(clock_difference(one, other), kAhead);
  EXPECT_EQ(clock_difference(other, one), -kAhead);
  for (StageSpan& s : other)
    // the second GPU sends earlier: the difference of the clocks lies within bounds
    if (s.sent_ns > 0) s.sent_ns -= 400;
  EXPECT_NEAR(double(clock_difference(one, other)), double(kAhead), 400);
  const auto both = of_one_clock({one, other});
  ASSERT_EQ(both.size(), 44u);
  EXPECT_EQ(both[21].gpu, 0u);
  EXPECT_EQ(both[22].gpu, 1u);
  EXPECT_NEAR(double(both[22].begin_ns), double(one[0].begin_ns), 400);
  EXPECT_THROW(clock_difference(spans_of(some_trace(), some_words(some_trace())), other), Error);
  const Json file = parse_json(perfetto_json(both, "two"), "trace");
  std::map<std::pair<int, std::string>, int> count;
  for (const auto& e : file.at("traceEvents")) {
    if (e.at("ph") == "X") ++count[{e.at("pid"), e.at("name")}];
    if (e.at("name") == "process_name")
      EXPECT_EQ(e.at("args").at("name"), e.at("pid") == 0 ? "two, GPU 0" : "two, GPU 1");
    if (e.at("name") == "down") EXPECT_DOUBLE_EQ(e.at("args").at("exchange_us"), e.at("pid") == 0 ? 2 : 2.4);
  }
  for (const int gpu : {0, 1}) {
    EXPECT_EQ((count[{gpu, "exchange"}]), 8);
    EXPECT_EQ((count[{gpu, "token"}]), 2);
  }
}

}  // namespace
}  // namespace ingot::decode
