#include "ingot/apps/cli/measure/decode.h"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <tuple>

#include "ingot/gpu/allocator.h"
#include "ingot/gpu/bandwidth.h"
#include "ingot/gpu/plain_launches.h"
#include "ingot/io/file.h"
#include "ingot/models/decode/megakernel/megakernel.h"
#include "ingot/models/decode/model/ranked_model.h"
#include "ingot/models/decode/model/trace.h"
#include "ingot/models/families/synthetic.h"
#include "ingot/models/gpt_oss/archive.h"

namespace ingot {

bool is_family_size(const std::string& size) {
  const std::vector<std::string>& names = synthetic_family_names();
  return std::find(names.begin(), names.end(), size) != names.end();
}
DecoderSpec measured_spec(const std::string& size) {
  if (is_family_size(size)) return synthetic_family(size);
  return synthetic_gpt_oss(size);
}
std::string measured_name(const std::string& size) { return is_family_size(size) ? size : "GPT-OSS-" + size; }

#ifndef INGOT_HAS_CUDA_DECODE

DecodeTimes measure_decode(const DecodeMeasurement&) {
  fail(ErrorCode::unsupported, "decode on a GPU: Ingot was built without CUDA, expected a build with it");
}

#else
namespace {

using decode::DeviceModel;
using decode::RankedModel;

Stream stream_of(const DeviceModel& m) { return m.stream(); }
Stream stream_of(const RankedModel& m) { return m.rank(0).stream(); }
bool has_prefilter(const DeviceModel& m) { return m.has_prefilter(); }
bool has_prefilter(const RankedModel& m) { return m.rank(0).has_prefilter(); }

DecoderWeights measured_shapes(const DecoderSpec& c, const DecodeMeasurement& o) {
  return decode::shapes_of(c, o.dense, is_family_size(o.size) ? o.dense : WeightFormat::mxfp4);
}

int64_t bytes_of_step(const DeviceModel& m, int64_t context, int64_t sequences, double experts) {
  const DecoderSpec& c = m.config();
  int64_t bytes = m.model().head.matrix_bytes;
  for (const auto& l : m.model().layers) {
    bytes += l.qkv.matrix_bytes + l.o.matrix_bytes + l.router.matrix_bytes +
             int64_t((l.experts ? experts : 1) * double(l.gate_up.matrix_bytes + l.down.matrix_bytes));
    const int64_t keys = l.window > 0 ? std::min<int64_t>(l.window, context) : context;
    bytes +=
        sequences * 2 * 2 * keys * (m.model().kv_heads < 0 ? c.kv_heads : m.model().kv_heads) * decode::cache_dim(c);
  }
  return bytes;
}
int64_t bytes_of_token(const DeviceModel& m, int64_t context) {
  return bytes_of_step(m, context, 1, double(m.config().experts_per_token));
}

// The bytes that a token reads with the int8 prefilter; 0 where the model has no prefilter.
int64_t bytes_with_prefilter(const DeviceModel& m, int64_t context) {
  if (!m.has_prefilter()) return 0;
  return bytes_of_token(m, context) - m.model().head.matrix_bytes + m.model().prefilter.codes.matrix_bytes;
}

double seconds_of_reading(const DeviceModel& m, int64_t bytes) {
  gpu::DeviceMemory sink(16);
  gpu::Event begin, end;
  double best = 1e9;
  for (int i = 0; i < 4; ++i) {
    begin.record(m.stream());
    gpu::read_kernel(m.model().embed, bytes, sink.data(), m.stream());
    end.record(m.stream());
    end.synchronize();
    best = std::min(best, end.seconds_since(begin));
  }
  return best;
}

// Feeds ids that are far apart, so that tokens go to different experts. The last batch may be shorter.
template <class Model> void feed_prompt(Model& m, int64_t length, int64_t batch) {
  std::vector<int32_t> ids;
  for (int64_t at = 0; at < length; at += int64_t(ids.size())) {
    ids.resize(size_t(std::min(batch, length - at)));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = int32_t((int64_t(i) * 7919 + at * 1959 + 13) % m.config().vocab);
    m.extend(ids, at + int64_t(ids.size()) == length ? 1 : 0);
  }
}
// The milliseconds of a prompt of `length` tokens, measured the second time, because the first time records the CUDA
// graphs.
template <class Model> double time_prompt(Model& m, int64_t length, int64_t batch) {
  gpu::Event begin, end;
  for (int round = 0; round < 2; ++round) {
    m.rewind(0);
    begin.record(stream_of(m));
    feed_prompt(m, length, batch);
    end.record(stream_of(m));
  }
  end.synchronize();
  return 1e3 * end.seconds_since(begin);
}

constexpr int64_t kWarmUp = 10;
// The time of `count` calls of next(), after some calls that are not timed.
template <class Next> TokenTimes time_steps(Stream stream, int64_t count, Next&& next) {
  for (int64_t i = 0; i < kWarmUp; ++i) next();
  std::vector<std::unique_ptr<gpu::Event> > events;
  for (int64_t i = 0; i <= count; ++i) events.push_back(std::make_unique<gpu::Event>());
  events[0]->record(stream);
  for (int64_t i = 0; i < count; ++i) {
    next();
    events[size_t(i) + 1]->record(stream);
  }
  events.back()->synchronize();
  std::vector<double> ms;
  for (int64_t i = 0; i < count; ++i) ms.push_back(1e3 * events[size_t(i) + 1]->seconds_since(*events[size_t(i)]));
  TokenTimes times{.mean_ms = 1e3 * events.back()->seconds_since(*events[0]) / double(count)};
  std::sort(ms.begin(), ms.end());
  times.best_ms = ms[0], times.p50_ms = ms[ms.size() / 2], times.p99_ms = ms[ms.size() * 99 / 100];
  return times;
}
template <class Model> TokenTimes time_tokens(Model& m, int64_t tokens, bool id_alone = false) {
  const TokenTimes times = time_steps(stream_of(m), tokens, [&] { m.continue_greedily(1, 0, id_alone); });
  m.likeliest();  // throws where the logits are not finite
  return times;
}
// The time of a token at temperature 1, with the prefilter where the model has one.
template <class Model> TokenTimes time_sampled_tokens(Model& m, int64_t tokens) {
  sampling::RowNoise noise{.seed = 1, .temperature = 1};
  const TokenTimes times = time_steps(stream_of(m), tokens, [&] {
    m.continue_sampling(1, noise, 0, true);
    ++noise.step;  // the kernel counts the step in the same way
  });
  m.likeliest();  // throws where the logits are not finite
  return times;
}
// The time of a token by the launches of the phased path without a CUDA graph, each after the end of the launch before.
TokenTimes time_plain_launches(DeviceModel& m, int64_t tokens) {
  const gpu::PlainLaunches step(m.stream(), [&] {
    run(m.model(), m.buffers(), {.head_rows = 1, .capacity = uint32_t(m.context())}, m.stream());
  });
  return time_steps(m.stream(), tokens, [&] { step.launch(m.stream()); });
}
// Times each path from the same position.
template <class Model, class Times>
void time_paths(Model& m, const DecodeMeasurement& o, int64_t context, Times& times) {
  for (const auto& [name, wanted, persistent] :
       {std::tuple{"phased", o.phased, false}, {"megakernel", o.megakernel, true}}) {
    if (!wanted || !m.use_megakernel(persistent)) continue;
    m.fill_cache_with_random(context);
    times.token.emplace_back(name, time_tokens(m, o.tokens));
    if constexpr (std::is_same_v<Model, DeviceModel>)
      if (!persistent) {
        m.fill_cache_with_random(context);
        times.token.emplace_back("plain_launches", time_plain_launches(m, o.tokens));
      }
    if (!persistent) continue;
    if (has_prefilter(m)) {
      m.fill_cache_with_random(context);
      times.token.emplace_back("prefiltered", time_tokens(m, o.tokens, true));
    }
    m.fill_cache_with_random(context);
    times.token.emplace_back("sampled", time_sampled_tokens(m, o.tokens));
  }
}

using PhaseTimes = std::vector<std::pair<std::string, double> >;
// The times of the phases in the last step of these sequences, or of a single token. The phases of the experts come
// first, while the lists still belong to that step: a phase that is executed repeatedly leaves residual streams in
// which all sequences choose the same experts.
PhaseTimes time_phases(const DeviceModel& m, uint32_t sequences) {
  using namespace decode;
  PhaseTimes times;
  const Buffers& buffers = sequences > 1 ? m.sequences_buffers() : m.buffers();
  const std::pair<const char*, uint32_t> phases[] = {
      {"gate and up", kGateUp},  {"down", kDown},     {"qkv", kQkv},  {"router", kRouter},
      {"attention", kAttention}, {"output", kOutput}, {"head", kHead}};
  for (const auto& [name, bit] : phases) {
    if (bit == kRouter && m.config().experts == 0) continue;
    const gpu::Graph graph(m.stream(), [&, mask = bit] {
      run(m.model(), buffers,
          {.T = sequences,
           .head_rows = sequences,
           .capacity = uint32_t(m.context()),
           .phases = mask,
           .sequences = sequences > 1 ? &m.sequences() : nullptr},
          m.stream());
    });
    constexpr int kRounds = 10;
    graph.launch(m.stream());
    gpu::Event begin, end;
    begin.record(m.stream());
    for (int i = 0; i < kRounds; ++i) graph.launch(m.stream());
    end.record(m.stream());
    end.synchronize();
    const double launches = double(kRounds) * double(bit == kHead ? 1 : m.config().layers);
    times.emplace_back(name, 1e6 * end.seconds_since(begin) / launches);
  }
  return times;
}

AnswerTimes time_answer(DeviceModel& m, int64_t prompt, int64_t tokens) {
  gpu::Event begin, first, end;
  for (const int64_t n : {int64_t(1), tokens}) {  // the first time records the CUDA graphs
    m.rewind(0);
    begin.record(m.stream());
    feed_prompt(m, prompt, m.prompt_batch());
    first.record(m.stream());
    m.continue_greedily(n - 1);
    end.record(m.stream());
    m.likeliest();  // throws where the logits are not finite
  }
  return {.prompt = prompt,
          .tokens = tokens,
          .first_token_ms = 1e3 * first.seconds_since(begin),
          .whole_ms = 1e3 * end.seconds_since(begin)};
}

// The mean number of distinct experts in a layer of the last step, which had this number of sequences.
double experts_of_a_layer(const DeviceModel& m, int64_t sequences) {
  if (m.config().experts == 0) return 0;
  if (m.takes_matrix_kernels(sequences)) {
    const int64_t k = m.config().experts_per_token, rows = decode::batch_rows(uint32_t(sequences));
    std::vector<uint32_t> chosen(size_t(m.config().layers * rows * k));
    gpu::copy_to_host(chosen.data(), m.prompt_buffers().chosen, int64_t(chosen.size()) * 4);
    size_t experts = 0;
    for (int64_t l = 0; l < m.config().layers; ++l) {
      const auto first = chosen.begin() + l * rows * k;
      experts += std::set<uint32_t>(first, first + sequences * k).size();
    }
    return double(experts) / double(m.config().layers);
  }
  std::vector<uint32_t> counts(size_t(m.config().layers));
  gpu::copy_to_host(counts.data(), m.sequences_buffers().lists.count, int64_t(counts.size()) * 4);
  return double(std::accumulate(counts.begin(), counts.end(), 0u)) / double(counts.size());
}
// The sequences begin with different ids, so that their tokens choose different experts.
void time_batched_steps(DeviceModel& m, const DecodeMeasurement& o, bool row_kernel, bool takes_row_kernel,
                        DecodeTimes& times) {
  for (const int64_t n : o.sequences) {
    if (row_kernel && (n == 1 || n > int64_t(decode::kKernelRows))) continue;
    const bool takes = takes_row_kernel && 1 < n && n <= int64_t(decode::kKernelRows);
    BatchedStepTimes t{.sequences = n, .row_kernel = row_kernel, .in_use = row_kernel == takes};
    std::vector<int> slots;
    std::vector<int32_t> ids;
    for (int s = 0; s < int(n); ++s) {
      slots.push_back(s);
      ids.push_back(int32_t((int64_t(s) * 7919 + 13) % m.config().vocab));
    }
    const auto begin = [&] {
      for (const int s : slots) m.fill_cache_with_random(o.context, s);
      n == 1 ? m.extend(ids, 1, 0) : m.extend_sequences(slots, ids);
    };
    begin();
    if (n == 1) {
      t.step = time_tokens(m, o.tokens);
      t.experts = double(m.config().experts_per_token);
    } else {
      t.step = time_steps(m.stream(), o.tokens, [&] { m.continue_sequences(slots, 1); });
      begin();  // repeats the same steps, whose experts are counted
      m.continue_sequences(slots, kWarmUp);
      for (int64_t i = 0; i < o.tokens; ++i) {
        m.continue_sequences(slots, 1);
        m.synchronize();
        t.experts += experts_of_a_layer(m, n) / double(o.tokens);
      }
      for (const int s : slots) m.likeliest(s);  // throws where the logits are not finite
      if (o.phases && !row_kernel && !m.takes_matrix_kernels(n)) t.phases = time_phases(m, uint32_t(n));
    }
    t.step_bytes = bytes_of_step(m, o.context + o.tokens / 2, n, t.experts);
    times.sequences.push_back(t);
  }
}

// The times of the stages in block 0 of each GPU, as means over all layers and some tokens.
std::vector<std::vector<StageTimes> > time_stages(RankedModel& m) {
  constexpr int kTokens = 10;
  std::vector<std::vector<StageTimes> > times(static_cast<size_t>(m.ranks()));
  for (auto& of_gpu : times)
    for (uint32_t i = 0; i < decode::kGridBarriersPerLayer; ++i) of_gpu.push_back({decode::stage_name(i)});
  const double share = 1e-3 / double(kTokens * m.config().layers);
  m.trace_token(1);  // loads the code
  for (int token = 0; token < kTokens; ++token) {
    std::map<std::pair<uint32_t, uint32_t>, uint64_t> shortest;  // by layer and stage
    for (const auto& s : m.trace_token(1)) {
      if (s.stage >= decode::kGridBarriersPerLayer) continue;  // skips the head
      StageTimes& t = times[s.gpu][s.stage];
      t.work_us += double(s.done_ns - s.begin_ns) * share;
      t.wait_us += double(s.on_ns - s.done_ns) * share;
      t.exchange_us += double(s.came_ns - s.sent_ns) * share;
      uint64_t& least = shortest.try_emplace({s.layer, s.stage}, ~uint64_t(0)).first->second;
      least = std::min(least, s.came_ns - s.sent_ns);
    }
    for (const auto& [at, ns] : shortest)
      for (auto& of_gpu : times) of_gpu[at.second].last_exchange_us += double(ns) * share;
  }
  return times;
}
// Writes the trace of the second token, because the first launch loads the code.
void write_trace(RankedModel& m, const DecodeMeasurement& o) {
  const uint32_t blocks = uint32_t(gpu::device_info().sms);
  m.trace_token(blocks);
  write_file(o.trace, perfetto_json(m.trace_token(blocks), measured_name(o.size) + " shapes, a token"));
}

int64_t slots_for(const DecodeMeasurement& o) {
  return o.sequences.empty() ? 1 : std::max<int64_t>(1, *std::max_element(o.sequences.begin(), o.sequences.end()));
}
void measure_one(const DecoderSpec& c, const DecodeMeasurement& o, int64_t room, DecodeTimes& times) {
  const DecoderWeights shapes = measured_shapes(c, o);
  RankedModel one(c, shapes, DeviceModel::fit_to_memory(c, shapes, {.context = room, .slots = slots_for(o)}), 1);
  DeviceModel& m = one.rank(0);
  times.weight_bytes = m.weight_bytes();
  constexpr int64_t kSome = 10;  // batches to time
  times.prompt_ms = time_prompt(m, kSome * m.batch(), m.batch()) / double(kSome);
  if (o.prompt) times.first_token_ms = time_prompt(m, o.context, m.prompt_batch());
  time_paths(m, o, o.context, times);
  times.token_bytes = bytes_of_token(m, o.context + o.tokens / 2);
  times.prefiltered_bytes = bytes_with_prefilter(m, o.context + o.tokens / 2);
  const int64_t bytes = std::min<int64_t>(m.weight_bytes(), int64_t(8) << 30) / 16 * 16;
  times.read_TBps = double(bytes) / seconds_of_reading(m, bytes) * 1e-12;
  for (const int64_t context : o.contexts) {
    ContextTimes& t = times.contexts.emplace_back();
    t.context = context;
    time_paths(m, o, context, t);
    t.token_bytes = bytes_of_token(m, context + o.tokens / 2);
    t.prefiltered_bytes = bytes_with_prefilter(m, context + o.tokens / 2);
  }
  m.use_megakernel(o.megakernel);
  for (const auto& [prompt, tokens] : o.answers) times.answers.push_back(time_answer(m, prompt, tokens));
  if (o.small_batch >= 0) m.limit_small_batch(o.small_batch);
  const bool takes_row_kernel = m.use_row_kernel(decode::RowKernelUse::where_faster);
  m.use_row_kernel(decode::RowKernelUse::none);
  time_batched_steps(m, o, false, takes_row_kernel, times);
  if (m.use_row_kernel(decode::RowKernelUse::all)) time_batched_steps(m, o, true, takes_row_kernel, times);
  m.use_row_kernel(decode::RowKernelUse::where_faster);
  if (o.grid_barriers) {
    const uint32_t width = uint32_t(c.hidden) / 4 * 4;
    times.idle = megakernel::measure_grid_barriers(width, false),
    times.loaded = megakernel::measure_grid_barriers(width, true);
  }
  if (o.phases && o.phased) times.phases = time_phases(m, 1);
  m.fill_cache_with_random(o.context);
  const bool one_kernel = o.megakernel && m.takes_trace();
  if (o.phases && one_kernel) times.stages = time_stages(one)[0];
  if (!o.trace.empty() && one_kernel && o.gpus.empty()) write_trace(one, o);
}
// Of a model that several GPUs share.
void measure_shared(const DecoderSpec& c, const DecoderOptions& options, const DecodeMeasurement& o,
                    DecodeTimes& times) {
  SharedTimes& shared = times.shared.emplace_back();
  shared.gpus = int(options.gpus);
  for (const auto& [to, load] : {std::pair{&shared.idle, megakernel::ExchangeLoad::none},
                                 {&shared.loaded, megakernel::ExchangeLoad::memory},
                                 {&shared.link, megakernel::ExchangeLoad::link}})
    *to = megakernel::measure_exchange(shared.gpus, uint32_t(c.hidden), load);
  const DecoderWeights shapes = measured_shapes(c, o);
  RankedModel m(c, shapes, DeviceModel::fit_to_memory(c, shapes, options), 1);
  if (times.weight_bytes == 0) times.weight_bytes = m.weight_bytes();
  constexpr int64_t kSome = 10;  // batches to time
  shared.prompt_ms = time_prompt(m, kSome * m.batch(), m.batch()) / double(kSome);
  if (o.prompt) shared.first_token_ms = time_prompt(m, o.context, m.prompt_batch());
  time_paths(m, o, o.context, shared);
  for (int r = 0; r < m.ranks(); ++r) {
    const int64_t context = o.context + o.tokens / 2, bytes = bytes_of_token(m.rank(r), context);
    shared.token_bytes = std::max(shared.token_bytes, bytes);
    if (has_prefilter(m))  // on the GPUs with rows of the head
      shared.prefiltered_bytes = std::max(shared.prefiltered_bytes,
                                          m.rank(r).has_prefilter() ? bytes_with_prefilter(m.rank(r), context) : bytes);
  }
  if (!o.megakernel || !m.use_megakernel(true)) return;
  m.fill_cache_with_random(o.context);
  shared.stages = time_stages(m);
  if (!o.trace.empty()) write_trace(m, o);
}

void check(const DecodeMeasurement& o) {
  const bool several = !o.gpus.empty();
  for (const int gpus : several ? o.gpus : std::vector<int>{1})
    if (const std::string unsupported_reason = decode::ranks_unsupported_reason(gpus); !unsupported_reason.empty())
      fail(ErrorCode::unsupported, "decode on ", several ? std::to_string(gpus) + " GPUs" : "a GPU", ": ",
           unsupported_reason);
  if (!o.trace.empty() && !o.megakernel)
    fail(ErrorCode::usage, "trace: found the phased path alone, expected the megakernel, whose stages it shows");
  if (!o.trace.empty() && o.gpus.size() > 1)
    fail(ErrorCode::usage, "trace: found ", o.gpus.size(), " numbers of GPUs, expected one, whose token it shows");
  for (const int64_t context : o.contexts)
    if (context < 1) fail(ErrorCode::usage, "contexts: found ", context, ", expected at least 1");
  for (const int64_t n : o.sequences)
    if (n < 1 || n > decode::kMostSequences)
      fail(ErrorCode::usage, "--sequences: found ", n, ", expected 1 to ", decode::kMostSequences);
  for (const auto& [prompt, tokens] : o.answers)
    if (prompt < 1 || tokens < 1)
      fail(ErrorCode::usage, "answers: found ", prompt, ":", tokens, ", expected at least 1:1");
  if (o.quant && (several || !o.phased || !o.trace.empty()))
    fail(ErrorCode::usage, "quant: found ", several ? "several GPUs" : "the megakernel or its trace",
         ", expected the phased path on one GPU");
  if (!o.sequences.empty() && several) fail(ErrorCode::usage, "--sequences: found several GPUs, expected one");
  if (is_family_size(o.size) && (o.quant || several))
    fail(ErrorCode::usage, "found ", o.quant ? "--quant" : "several GPUs", " with the shapes of ", o.size,
         ", expected those of GPT-OSS");
  if (several && !(o.contexts.empty() && o.answers.empty() && !o.grid_barriers))
    fail(ErrorCode::usage, "found several GPUs, expected one for contexts, answers and grid barriers");
}

// The most tokens of a slot during the measurements.
int64_t longest_slot(const DecodeMeasurement& o) {
  constexpr int64_t kUntimed = 64;  // the warm-up and the phases
  int64_t longest = o.context + o.tokens + kUntimed;
  for (const int64_t context : o.contexts) longest = std::max(longest, context + o.tokens + kUntimed);
  for (const auto& [prompt, tokens] : o.answers) longest = std::max(longest, prompt + tokens);
  return longest;
}

}  // namespace

DecodeTimes measure_decode(const DecodeMeasurement& o) {
  check(o);
  DecoderSpec c = measured_spec(o.size);
  c.e4m3_inputs = o.quant;
  const int64_t room = longest_slot(o);
  if (room > c.context)
    fail(ErrorCode::usage, "found ", room, " tokens, expected at most ", c.context, ", the model's context");
  std::vector<DecoderOptions> shared;
  for (const int gpus : o.gpus) {
    shared.push_back({.context = room, .gpus = gpus, .split = o.split});
    (void)decode::slices_of(c, gpus, shared.back().split);  // refuses a number of GPUs that cannot share the model
  }
  const int64_t alone = DeviceModel::bytes(c, measured_shapes(c, o), {.context = room, .slots = slots_for(o)});
  DecodeTimes times;
  if (o.gpus.empty() || alone <= gpu::device_memory(0).available()) measure_one(c, o, room, times);
  for (const auto& options : shared) measure_shared(c, options, o, times);
  return times;
}

#endif

}  // namespace ingot
