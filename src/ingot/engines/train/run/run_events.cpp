#include "ingot/engines/train/run/run_events.h"

#include <ctime>

#include "ingot/core/cpu/cpu.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/version.h"
#include "ingot/engines/train/run/run_log.h"

namespace ingot {
namespace {

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

}  // namespace

OrderedJson start_event(const TrainState& state, const RunProgress& at, const RunData& data, const RunRanks& ranks) {
  const RunConfig& config = state.config;
  OrderedJson line;
  line["event"] = at.step > 0 ? "resume" : "start";
  line["time"] = utc_now();
  line["version"] = version();
  line["commit"] = commit();
  line["cpu"] = cpu_model();
  line["cpu_level"] = name_of(cpu_level());
  line["threads"] = thread_count();
  if (ranks) line["ranks"] = ranks.world();
  if (state.device.kind == Device::cuda) line["gpu"] = gpu::device_info(state.device.index).name;
  line["seed"] = config.train.seed;
  line["step"] = at.step;
  line["seconds"] = at.trained_seconds;
  line["parameters"] = state.layout.count();
  line["data"] = data.train->name();
  line["data_fingerprint"] = data.train->fingerprint();
  line["train_tokens"] = data.train->size();
  line["held_out_tokens"] = data.held_out->size();
  line["tokenizer_hash"] = data.tokenizer->hash();
  line["config"] = OrderedJson::parse(to_json(config));
  return line;
}

OrderedJson step_event(const TrainStatus& s) {
  return {{"event", "step"},
          {"step", s.step},
          {"loss", finite_or_null(s.loss)},
          {"grad_norm", finite_or_null(s.grad_norm)},
          {"lr_factor", s.lr_factor},
          {"looping", s.looping},
          {"tokens_per_second", s.tokens_per_second},
          {"step_seconds", s.step_seconds},
          {"flops_per_second", s.flops_per_second},
          {"utilisation", s.utilisation > 0 ? OrderedJson(s.utilisation) : OrderedJson(nullptr)},
          {"memory_bytes", s.memory_bytes},
          {"seconds", s.seconds}};
}

OrderedJson score_event(const RunProgress& at, const Score& score) {
  return {{"event", "score"},
          {"step", at.step},
          {"loss", finite_or_null(score.loss)},
          {"bits_per_byte", finite_or_null(score.bits_per_byte)},
          {"targets", score.targets},
          {"bytes", score.bytes},
          {"scoring_seconds", score.seconds},
          {"seconds", at.trained_seconds}};
}

}  // namespace ingot
