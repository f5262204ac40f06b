#include "ingot/models/gpt_oss/decode/trace.h"

#include <algorithm>

#include "ingot/core/check.h"
#include "ingot/io/json.h"

namespace ingot::gpt_oss_decode {
namespace {

constexpr uint32_t kStages = 5, kHead = kStages;  // of a layer

// The events of one file, a line each.
class Events {
 public:
  explicit Events(uint64_t zero_ns) : zero_(zero_ns) {}
  void name(const char* what, uint32_t thread, const std::string& name) {
    add({{"ph", "M"}, {"name", what}, {"pid", 0}, {"tid", thread}, {"args", {{"name", name}}}});
  }
  void span(const std::string& name, uint32_t thread, uint64_t begin, uint64_t end, OrderedJson args = {}) {
    OrderedJson e{{"ph", "X"},
                  {"name", name},
                  {"pid", 0},
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
  events.span(stage_name(s.stage), s.block, s.begin_ns, s.on_ns, std::move(args));
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
    const auto stamps = row.first(t.stamps()), bytes = row.subspan(t.stamps());
    INGOT_CHECK(stamps[0] > 0 && std::is_sorted(stamps.begin(), stamps.end()), "decode trace: block ", b,
                ": found times that are missing or run backwards, expected growing ones");
    for (uint32_t n = 0; n <= t.handoffs; ++n) {
      const bool head = n == t.handoffs;
      const uint32_t stage = head ? kHead : n % kStages;
      spans.push_back({.block = b,
                       .layer = n / kStages,
                       .stage = stage,
                       .begin_ns = stamps[2 * n],
                       .done_ns = stamps[2 * n + 1],
                       .on_ns = stamps[2 * n + (head ? 1 : 2)],
                       .bytes = bytes[stage]});
    }
  }
  return spans;
}

std::string perfetto_json(std::span<const StageSpan> spans, const std::string& title) {
  uint64_t zero = ~uint64_t(0);
  for (const StageSpan& s : spans) zero = std::min(zero, s.begin_ns);
  Events events(zero);
  events.name("process_name", 0, title);
  for (size_t i = 0; i < spans.size();) {
    size_t end = i;
    while (end < spans.size() && spans[end].block == spans[i].block) ++end;
    const uint32_t block = spans[i].block;
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

}  // namespace ingot::gpt_oss_decode
