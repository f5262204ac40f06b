#include "ingot/apps/cli/measure/prompts.h"

#include <algorithm>
#include <cmath>

#include "ingot/apps/cli/measure/decode.h"
#include "ingot/core/clock.h"
#include "ingot/gpu/allocator.h"
#include "ingot/models/decode/model/ranked_model.h"
#include "ingot/models/gpt_oss/archive.h"

namespace ingot {

#ifndef INGOT_HAS_CUDA_DECODE

PromptMeasured measure_prompts(const PromptMeasurement&) {
  fail(ErrorCode::unsupported, "prompts on a GPU: Ingot was built without CUDA, expected a build with it");
}

#else
namespace {

using decode::DeviceModel;
using decode::RankedModel;

// Ids that are far apart, so that tokens go to different experts.
std::vector<int32_t> ids_of(int64_t n, int64_t vocab) {
  std::vector<int32_t> ids(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) ids[size_t(i)] = int32_t((i * 7919 + i / 16 * 1959 + 13) % vocab);
  return ids;
}

double milliseconds_of(RankedModel& m, std::span<const int32_t> ids, int64_t batch) {
  m.rewind(0);
  const auto begin = Clock::now();
  const size_t most = size_t(batch);
  for (size_t at = 0; at < ids.size(); at += most) {
    const auto part = ids.subspan(at, std::min(most, ids.size() - at));
    m.extend(part, at + part.size() == ids.size() ? 1 : 0);
  }
  m.likeliest();  // waits for the GPU, and throws where the logits are not finite
  return 1e3 * seconds_since(begin);
}

// The times of each length, sorted.
std::vector<std::vector<double> > time_prompts(RankedModel& m, const PromptMeasurement& o,
                                               std::span<const int32_t> ids) {
  std::vector<std::vector<double> > found(o.lengths.size());
  for (int64_t round = -1; round < o.rounds; ++round)  // the first round loads code and records graphs
    for (size_t i = 0; i < found.size(); ++i) {
      const double ms = milliseconds_of(m, ids.first(size_t(o.lengths[i])), m.prompt_batch());
      if (round >= 0) found[i].push_back(ms);
    }
  for (auto& of_length : found) std::sort(of_length.begin(), of_length.end());
  return found;
}

// Counts the operations and bytes of this GPU.
void count_work(const DeviceModel& m, PromptTimes& t) {
  const DecoderSpec& c = m.config();
  const double k = double(c.experts_per_token), E = double(c.experts);
  for (int64_t at = 0; at < t.tokens; at += m.prompt_batch()) {
    const double T = double(std::min(m.prompt_batch(), t.tokens - at)), chosen = E * (1 - std::pow(1 - k / E, T));
    for (const auto& l : m.model().layers) {
      const auto numbers = [](const decode::Matrix& w) { return double(w.rows) * double(w.cols); };
      t.bytes += double(l.qkv.matrix_bytes + l.o.matrix_bytes + l.router.matrix_bytes) +
                 chosen * double(l.gate_up.matrix_bytes + l.down.matrix_bytes);
      t.flops +=
          2 * T * (numbers(l.qkv) + numbers(l.o) + numbers(l.router) + k * (numbers(l.gate_up) + numbers(l.down)));
      const double before = l.window > 0 ? std::min<double>(l.window, double(at)) : double(at);
      const double keys = l.window > 0 ? std::min<double>(l.window, before + T / 2) : before + T / 2;
      t.flops += 4 * T * keys * double(l.o.cols);
    }
  }
  t.bytes += double(m.model().head.matrix_bytes);
}

// Measures over the GPUs of `m`. `alone` holds the time of each length on a single GPU, or is empty where one GPU has
// no room.
void measure_on(RankedModel& m, const PromptMeasurement& o, std::span<const int32_t> ids,
                const std::vector<std::vector<double> >& alone, PromptMeasured& measured) {
  const std::vector<std::vector<double> > found = time_prompts(m, o, ids);
  for (size_t i = 0; i < found.size(); ++i) {
    PromptTimes t{
        .gpus = m.ranks(), .tokens = o.lengths[i], .p50_ms = found[i][found[i].size() / 2], .best_ms = found[i][0]};
    if (!alone[i].empty()) t.one_ms = alone[i][alone[i].size() / 2];
    if (o.steps) {
      milliseconds_of(m, ids.first(size_t(std::min(t.tokens, 2 * m.batch()))), m.batch());  // records the graphs
      t.steps_ms = milliseconds_of(m, ids.first(size_t(t.tokens)), m.batch());
    }
    for (int r = 0; r < m.ranks(); ++r) {
      PromptTimes of_rank{.tokens = t.tokens};
      count_work(m.rank(r), of_rank);
      t.flops = std::max(t.flops, of_rank.flops), t.bytes = std::max(t.bytes, of_rank.bytes);
    }
    measured.times.push_back(t);
  }
  measured.weight_bytes = m.weight_bytes(), measured.chunk = m.prompt_batch();
}

}  // namespace

PromptMeasured measure_prompts(const PromptMeasurement& o) {
  const std::vector<int> counts = o.gpus.empty() ? std::vector<int>{1} : o.gpus;
  for (const int gpus : counts)
    if (const std::string unsupported_reason = decode::ranks_unsupported_reason(gpus); !unsupported_reason.empty())
      fail(ErrorCode::unsupported, "prompts on ", gpus > 1 ? std::to_string(gpus) + " GPUs" : "a GPU", ": ",
           unsupported_reason);
  const GptOssConfig c = synthetic_gpt_oss(o.size);
  INGOT_CHECK(!o.lengths.empty() && o.rounds > 0, "prompts: found ", o.lengths.size(), " lengths and ", o.rounds,
              " rounds, expected some of both");
  for (int64_t n : o.lengths)
    if (n < 1 || n > c.context)
      fail(ErrorCode::usage, "found a prompt of ", n, " tokens, expected 1 to ", c.context, ", the model's context");
  const int64_t longest = *std::max_element(o.lengths.begin(), o.lengths.end());
  const GptOssWeights shapes = decode::shapes_of(c, o.dense, WeightFormat::mxfp4);
  const DecoderOptions one{.context = longest, .int8_prefilter = false};
  for (const int gpus : counts) (void)decode::slices_of(c, gpus, o.split);
  const std::vector<int32_t> ids = ids_of(longest, c.vocab);
  std::vector<std::vector<double> > alone(o.lengths.size());
  if (!o.gpus.empty() && DeviceModel::bytes(c, shapes, one) <= gpu::device_memory(0).available()) {
    RankedModel m(c, shapes, one, 1);
    alone = time_prompts(m, o, ids);
  }
  PromptMeasured measured;
  for (const int gpus : counts) {
    RankedModel m(c, shapes, {.context = longest, .int8_prefilter = false, .gpus = gpus, .split = o.split}, 1);
    measure_on(m, o, ids, alone, measured);
  }
  return measured;
}

#endif

}  // namespace ingot
