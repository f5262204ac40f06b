#include "ingot/models/decode/model/trace.h"

#include <algorithm>
#include <map>

#include "ingot/core/check.h"
#include "ingot/io/json.h"
#include "ingot/models/decode/megakernel/megakernel.h"

namespace ingot::decode {
namespace {

constexpr uint32_t kStages = kGridBarriersPerLayer, kOutput = 2, kDown = 4, kHead = kStages;

// Writes the events of one file, one per line.
class Events {
 public:
  explicit Events(uint64_t zero_ns) : zero_(zero_ns) {}
  uint32_t gpu = 0;
  void name(const char* what, uint32_t thread, const std::string& name) {
    add({{"ph", "M"}, {"name", what}, {"pid", gpu}, {"tid", thread}, {"args", {{"name", name}}}});
  }
  void span(const std::string& name, uint32_t thread, uint64_t begin, uint64_t end, OrderedJson args = {}) {
    OrderedJson e{{"ph", "X"},
                  {"name", name},
                  {"pid", gpu},
                  {"tid", thread},
                  {"ts", double(begin - zero_) * 1e-3},
                  {"dur", double(end - begin) * 1e-3}};
    if (!args.empty()) e["args"] = std::move(args);
    add(e);
  }
  std::string text() && { return std::move(text_) + "\n]}\n"; }

 private:
  void add(const OrderedJson& e) {
    text_ += first_ ? "\n" : ",\n";
    text_ += show_json(e);
    first_ = false;
  }
  uint64_t zero_;
  bool first_ = true;
  std::string text_ = "{\"displayTimeUnit\": \"ns\", \"traceEvents\": [";
};

void add_stage(Events& events, const StageSpan& s) {
  const double work_ns = double(s.done_ns - s.begin_ns);
  OrderedJson args{{"work_us", work_ns * 1e-3}, {"wait_us", double(s.on_ns - s.done_ns) * 1e-3}};
  if (s.bytes > 0) {
    args["bytes"] = s.bytes;
    if (work_ns > 0) args["GB/s"] = double(s.bytes) / work_ns;
  }
  if (s.sent_ns > 0) args["exchange_us"] = double(s.came_ns - s.sent_ns) * 1e-3;
  events.span(stage_name(s.stage), s.block, s.begin_ns, s.on_ns, std::move(args));
  if (s.came_ns > s.sent_ns) events.span("exchange", s.block, s.sent_ns, s.came_ns);
  if (s.on_ns > s.done_ns) events.span("waiting", s.block, s.done_ns, s.on_ns);
}

}  // namespace

const char* stage_name(uint32_t stage) {
  static constexpr const char* kNames[kStages + 1] = {"qkv", "attention", "output", "gate and up", "down", "head"};
  return kNames[stage];
}

std::vector<StageSpan> spans_of(const megakernel::Trace& t, std::span<const uint64_t> words) {
  INGOT_CHECK(words.size() == size_t(t.blocks) * t.words_of_block(), "decode trace: found ", words.size(),
              " words, expected ", size_t(t.blocks) * t.words_of_block());
  std::vector<StageSpan> spans;
  for (uint32_t b = 0; b < t.blocks; ++b) {
    const auto row = words.subspan(size_t(b) * t.words_of_block(), t.words_of_block());
    const auto stamps = row.first(t.stamps()), bytes = row.subspan(t.stamps()),
               exchanges = bytes.subspan(std::min<size_t>(kTracedBytes, bytes.size()));
    INGOT_CHECK(stamps[0] > 0 && std::is_sorted(stamps.begin(), stamps.end()), "decode trace: block ", b,
                ": found times that are missing or run backwards, expected growing ones");
    for (uint32_t n = 0; n <= t.grid_barriers; ++n) {
      const bool head = n == t.grid_barriers;
      const uint32_t stage = head ? kHead : n % kStages;
      spans.push_back({.block = b,
                       .layer = n / kStages,
                       .stage = stage,
                       .begin_ns = stamps[2 * n],
                       .done_ns = stamps[2 * n + 1],
                       .on_ns = stamps[2 * n + (head ? 1 : 2)],
                       .bytes = bytes[stage]});
      if (exchanges.empty() || head || (stage != kOutput && stage != kDown)) continue;
      StageSpan& s = spans.back();
      const size_t at = size_t(s.layer) * kExchangeStamps + (stage == kOutput ? 0 : 2);
      s.sent_ns = exchanges[at], s.came_ns = exchanges[at + 1];
      INGOT_CHECK(s.begin_ns <= s.sent_ns && s.sent_ns <= s.came_ns && s.came_ns <= s.done_ns, "decode trace: block ",
                  b, ": found an exchange that is missing or not within its stage, expected one in order");
    }
  }
  return spans;
}

int64_t clock_difference(std::span<const StageSpan> one, std::span<const StageSpan> other) {
  // For each exchange: when the first block sent its part, and when the first block had all parts.
  const auto firsts = [](std::span<const StageSpan> spans) {
    std::map<std::pair<uint32_t, uint32_t>, std::pair<int64_t, int64_t>> found;
    for (const StageSpan& s : spans) {
      if (s.sent_ns == 0) continue;
      auto& [sent, came] = found.try_emplace({s.layer, s.stage}, INT64_MAX, INT64_MAX).first->second;
      sent = std::min(sent, int64_t(s.sent_ns)), came = std::min(came, int64_t(s.came_ns));
    }
    return found;
  };
  const auto here = firsts(one), there = firsts(other);
  int64_t least = INT64_MIN, most = INT64_MAX;
  for (const auto& [exchange, at] : here) {
    const auto found = there.find(exchange);
    if (found == there.end()) continue;
    least = std::max(least, found->second.first - at.second), most = std::min(most, found->second.second - at.first);
  }
  INGOT_CHECK(least != INT64_MIN, "decode trace: found no exchange of both GPUs, expected one");
  return least + (most - least) / 2;
}

std::vector<StageSpan> of_one_clock(std::vector<std::vector<StageSpan>> gpus) {
  for (size_t g = 1; g < gpus.size(); ++g) {
    const int64_t ahead = clock_difference(gpus[0], gpus[g]);
    for (StageSpan& s : gpus[g]) {
      for (uint64_t* t : {&s.begin_ns, &s.done_ns, &s.on_ns, &s.sent_ns, &s.came_ns})
        if (*t > 0) *t -= uint64_t(ahead);
      s.gpu = uint32_t(g);
    }
  }
  std::vector<StageSpan> all;
  for (const auto& spans : gpus) all.insert(all.end(), spans.begin(), spans.end());
  return all;
}

std::string perfetto_json(std::span<const StageSpan> spans, const std::string& title) {
  uint64_t zero = ~uint64_t(0);
  for (const StageSpan& s : spans) zero = std::min(zero, s.begin_ns);
  Events events(zero);
  const bool several = !spans.empty() && spans.back().gpu > 0;
  for (size_t i = 0; i < spans.size();) {
    size_t end = i;
    while (end < spans.size() && spans[end].gpu == spans[i].gpu && spans[end].block == spans[i].block) ++end;
    const uint32_t block = spans[i].block;
    if (i == 0 || spans[i].gpu != events.gpu) {
      events.gpu = spans[i].gpu;
      events.name("process_name", 0, several ? title + ", GPU " + std::to_string(events.gpu) : title);
    }
    events.name("thread_name", block, "block " + std::to_string(block));
    events.span("token", block, spans[i].begin_ns, spans[end - 1].on_ns);
    for (; i < end; ++i) {
      if (spans[i].stage == 0)
        events.span("layer " + std::to_string(spans[i].layer), block, spans[i].begin_ns, spans[i + kStages - 1].on_ns);
      add_stage(events, spans[i]);
    }
  }
  return std::move(events).text();
}

}  // namespace ingot::decode
