// ingot bench decode: the time of a token of GPT-OSS or of a family, with synthetic weights on a GPU, or of a given
// model as `generate` runs it.
#include <algorithm>
#include <chrono>
#include <optional>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/measure/decode.h"
#include "ingot/apps/cli/shared/models.h"
#include "ingot/apps/cli/shared/runs.h"
#include "ingot/core/version.h"
#include "ingot/gpu/device.h"
#include "ingot/io/json.h"
#include "ingot/models/decode/model/decoder.h"
#include "ingot/models/decode/weights/builder.h"
#include "ingot/models/families/family.h"
#include "ingot/models/families/synthetic.h"
#include "ingot/models/gpt_oss/spec.h"
#include "ingot/models/gpt_oss/weights.h"

namespace ingot::cli {
namespace {

struct DecodeBench {
  std::string size = "120b", dense = "bf16";
  DecodeMeasurement measurement;
  bool phased = false, megakernel = false;  // measure this path only
  bool json = false, kernels_alone = false;
  std::string model, device = "auto";
  std::string contexts, answers, sequences, gpus;
};

void print_path(const std::string& path, const TokenTimes& of, const std::string& more) {
  write_out(path + ": mean " + fixed(of.mean_ms, 3) + " ms a token, p50 " + fixed(of.p50_ms, 3) + ", p99 " +
            fixed(of.p99_ms, 3) + ", best " + fixed(of.best_ms, 3) + "; " + fixed(1e3 / of.mean_ms, 0) + " tokens/s" +
            more + "\n");
}
std::string shown_path(const std::string& path) {
  return path == "prefiltered"      ? "megakernel, int8 prefilter of the head"
         : path == "sampled"        ? "megakernel, sampled at temperature 1"
         : path == "plain_launches" ? "phased, without a graph and without programmatic launches"
                                    : path;
}
void print_shared(const DecodeBench& o, const DecodeTimes& t, const SharedTimes& s) {
  const std::string gpus = std::to_string(s.gpus) + " GPUs";
  write_out(gpus + ", " + name_of(o.measurement.split) + ": a token reads at most " +
            fixed(double(s.token_bytes) * 1e-9, 3) + " GB on one of them\n");
  for (const auto& [path, of] : s.token) {
    const auto alone = std::find_if(t.token.begin(), t.token.end(), [&](const auto& one) { return one.first == path; });
    print_path(
        shown_path(path) + ", " + gpus, of,
        alone == t.token.end() ? "" : "; " + fixed(of.mean_ms / alone->second.mean_ms, 3) + " of one GPU's time");
  }
  write_out("16 tokens of a prompt: " + fixed(s.prompt_ms, 2) + " ms\n");
  if (o.measurement.prompt) write_out("time to first token: " + fixed(s.first_token_ms, 1) + " ms\n");
  for (size_t g = 0; g < s.stages.size(); ++g)
    for (const StageTimes& of : s.stages[g])
      write_out("  GPU " + std::to_string(g) + ", " + of.name + ": " + fixed(of.work_us, 2) + " us of work, " +
                (of.exchange_us > 0 ? "of it " + fixed(of.exchange_us, 2) + " until all parts were there (" +
                                          fixed(of.last_exchange_us, 2) + " on the GPU that was last), "
                                    : "") +
                fixed(of.wait_us, 2) + " of waiting\n");
  for (const auto& [name, of] :
       {std::pair{"idle", s.idle}, {"while memory is read", s.loaded}, {"while the next one's memory is read", s.link}})
    write_out(std::string("an exchange, ") + name + ": store to poll " + fixed(of.one_way, 2) +
              " us, both ways at once " + fixed(of.both_ways, 2) + "; a grid barrier with one " +
              fixed(of.exchange, 2) + " us, within a GPU " + fixed(of.local, 2) + "\n");
}

template <class Times> void print_paths(const Times& t, double read_TBps) {
  for (const auto& [path, of] : t.token) {
    const bool prefiltered = path == "prefiltered" || path == "sampled";
    const double TBps =
        double(prefiltered && t.prefiltered_bytes > 0 ? t.prefiltered_bytes : t.token_bytes) / of.mean_ms * 1e-9;
    const std::string speed =
        read_TBps > 0 ? ", " + fixed(TBps, 2) + " TB/s, " + fixed(100 * TBps / read_TBps, 0) + " % of reading alone"
        : TBps > 0    ? ", " + fixed(1e3 * TBps, 1) + " GB/s"
                      : "";
    print_path(shown_path(path), of, speed);
  }
}

void print_contexts(const DecodeTimes& t) {
  for (const ContextTimes& at : t.contexts) {
    const std::string bytes = at.token_bytes > 0 ? ", " + fixed(double(at.token_bytes) * 1e-9, 3) + " GB" : "";
    write_out(with_commas(at.context) + " tokens of context" + bytes + ":\n");
    print_paths(at, t.read_TBps);
  }
  for (const AnswerTimes& a : t.answers)
    write_out("a prompt of " + with_commas(a.prompt) + " tokens, " + with_commas(a.tokens) +
              " of an answer: first token " + fixed(a.first_token_ms, 1) + " ms, then " + fixed(a.token_ms(), 3) +
              " ms a token, all in " + fixed(1e-3 * a.whole_ms, 3) + " s\n");
}

// The times of tokens in `generate`, by the kind of sampling: the decoder's call and the copy of the id to the host,
// one after the other. The name contains the number of GPUs where several are measured, and the sampling.
struct SampledTimes {
  int64_t gpus = 1;
  std::vector<std::pair<std::string, TokenTimes>> token;
};
using PathTimes = std::vector<std::pair<std::string, TokenTimes>>;
// The time of the kernels alone: for a greedy token by the fastest path, for the other kinds at temperature 1; 0: not
// measured.
double kernels_ms(const PathTimes& paths, const std::string& sampling) {
  double best = 0;
  for (const auto& [path, of] : paths)
    if ((path == "sampled") == (sampling != "greedy")) best = best > 0 ? std::min(best, of.mean_ms) : of.mean_ms;
  return best;
}
PathTimes kernels_of(const DecodeTimes& t, int64_t gpus) {
  for (const SharedTimes& s : t.shared)
    if (s.gpus == gpus) return s.token;
  return gpus == 1 ? t.token : PathTimes();
}
void print_sampled(const SampledTimes& s, const PathTimes& kernels) {
  write_out(std::string("tokens through the decoder, as `generate` gets them") +
            (s.gpus > 1 ? ", " + std::to_string(s.gpus) + " GPUs" : "") + ":\n");
  for (const auto& [name, of] : s.token) {
    const double alone = kernels_ms(kernels, name);
    print_path("  " + name, of,
               alone > 0 ? "; " + fixed(100 * (of.mean_ms / alone - 1), 1) + " % over the kernels alone" +
                               (name == "greedy" ? "" : " at temperature 1")
                         : "");
  }
}

void print_times(const DecodeBench& o, const DecodeTimes& t) {
  const std::string text = measured_name(o.size) + " shapes, " + o.dense +
                           (is_family_size(o.size) ? "" : " and mxfp4 experts") +
                           (o.measurement.quant ? " of e4m3 inputs, " : ", ") + with_commas(o.measurement.context) +
                           " tokens of context, " + fixed(double(t.weight_bytes) * 1e-9, 1) + " GB of weights\n";
  write_out(text);
  const auto print_all_shared = [&] {
    for (const SharedTimes& s : t.shared) print_shared(o, t, s);
  };
  if (t.token.empty()) return print_all_shared();  // no single GPU has room for the model
  write_out("a token reads " + fixed(double(t.token_bytes) * 1e-9, 3) + " GB; reading alone reaches " +
            fixed(t.read_TBps, 2) + " TB/s here\n");
  print_paths(t, t.read_TBps);
  print_contexts(t);
  write_out("16 tokens of a prompt: " + fixed(t.prompt_ms, 2) + " ms\n");
  if (o.measurement.prompt) write_out("time to first token: " + fixed(t.first_token_ms, 1) + " ms\n");
  for (const BatchedStepTimes& s : t.sequences) {
    const double TBps = double(s.step_bytes) / s.step.mean_ms * 1e-9;
    write_out(std::to_string(s.sequences) + (s.sequences == 1 ? " sequence" : " sequences") +
              (s.row_kernel ? ", one kernel: " : ": ") + fixed(s.step.mean_ms, 3) + " ms a step, p50 " +
              fixed(s.step.p50_ms, 3) + ", p99 " + fixed(s.step.p99_ms, 3) + "; " +
              fixed(1e3 * double(s.sequences) / s.step.mean_ms, 0) + " tokens/s; " +
              (s.experts > 0 ? fixed(s.experts, 1) + " experts a layer, " : "") +
              fixed(double(s.step_bytes) * 1e-9, 3) + " GB, " + fixed(100 * TBps / t.read_TBps, 0) +
              " % of reading alone\n");
    for (const auto& [name, us] : s.phases) write_out("  " + name + ": " + fixed(us, 2) + " us a launch\n");
  }
  if (o.measurement.grid_barriers)
    for (const auto& [name, of] : {std::pair{"idle", t.idle}, {"under load", t.loaded}})
      write_out(std::string("a grid barrier, ") + name + ": a barrier alone " + fixed(of.barrier, 2) +
                " us, with a fence " + fixed(of.fenced, 2) + ", stamped words " + fixed(of.stamped, 2) +
                ", the same without a barrier " + fixed(of.polled, 2) + "\n");
  for (const auto& [name, us] : t.phases) write_out("  " + name + ": " + fixed(us, 2) + " us a launch\n");
  for (const StageTimes& s : t.stages)
    write_out("  megakernel, " + s.name + ": " + fixed(s.work_us, 2) + " us of work, " + fixed(s.wait_us, 2) +
              " of waiting\n");
  print_all_shared();
}

OrderedJson as_json(const std::vector<std::pair<std::string, TokenTimes>>& paths) {
  OrderedJson token = OrderedJson::object();
  for (const auto& [path, of] : paths)
    token[path] = {{"mean_ms", of.mean_ms}, {"p50_ms", of.p50_ms}, {"p99_ms", of.p99_ms}, {"best_ms", of.best_ms}};
  if (token.contains("prefiltered")) token["screened"] = token["prefiltered"];  // the earlier name, for one version
  return token;
}
OrderedJson as_json(const megakernel::ExchangeTimes& e) {
  return {{"one_way_us", e.one_way},
          {"both_ways_us", e.both_ways},
          {"grid_barrier_us", e.local},
          {"exchange_us", e.exchange}};
}

OrderedJson as_json(const megakernel::GridBarrierTimes& h) {
  return {{"barrier_us", h.barrier}, {"fenced_us", h.fenced}, {"stamped_us", h.stamped}, {"polled_us", h.polled}};
}

void add_sampled(OrderedJson& json, const std::vector<SampledTimes>& sampled) {
  for (const SampledTimes& s : sampled) json["sampled"].push_back({{"gpus", s.gpus}, {"token", as_json(s.token)}});
}
void add_contexts(OrderedJson& json, const DecodeTimes& t) {
  for (const ContextTimes& at : t.contexts)
    json["contexts"].push_back({{"context", at.context},
                                {"token", as_json(at.token)},
                                {"token_bytes", at.token_bytes},
                                {"prefiltered_bytes", at.prefiltered_bytes},
                                {"screened_bytes", at.prefiltered_bytes}});
  for (const AnswerTimes& a : t.answers)
    json["answers"].push_back({{"prompt", a.prompt},
                               {"tokens", a.tokens},
                               {"first_token_ms", a.first_token_ms},
                               {"token_ms", a.token_ms()},
                               {"whole_ms", a.whole_ms}});
}
OrderedJson as_json(const SharedTimes& s, Split split) {
  OrderedJson by_gpu = OrderedJson::array();
  for (const auto& of_gpu : s.stages) {
    by_gpu.push_back(OrderedJson::object());
    for (const StageTimes& of : of_gpu) {
      by_gpu.back()[of.name] = {{"work_us", of.work_us}, {"wait_us", of.wait_us}};
      if (of.exchange_us > 0)
        by_gpu.back()[of.name].update({{"exchange_us", of.exchange_us}, {"last_exchange_us", of.last_exchange_us}});
    }
  }
  return {{"gpus", s.gpus},
          {"split", name_of(split)},
          {"token", as_json(s.token)},
          {"prompt_ms_of_16", s.prompt_ms},
          {"token_bytes", s.token_bytes},
          {"prefiltered_bytes", s.prefiltered_bytes},
          {"screened_bytes", s.prefiltered_bytes},
          {"first_token_ms", s.first_token_ms},
          {"stages", by_gpu},
          {"exchange_idle", as_json(s.idle)},
          {"exchange_loaded", as_json(s.loaded)},
          {"exchange_link", as_json(s.link)}};
}
OrderedJson as_json(const DecodeBench& o, const DecodeTimes& t) {
  OrderedJson stages = OrderedJson::object();
  for (const StageTimes& s : t.stages) stages[s.name] = {{"work_us", s.work_us}, {"wait_us", s.wait_us}};
  OrderedJson phases = OrderedJson::object();
  for (const auto& [name, us] : t.phases) phases[name] = us;
  OrderedJson json{{"version", version()},
                   {"commit", commit()},
                   {"gpu", gpu::device_info().name},
                   {"model", is_family_size(o.size) ? o.size : "gpt-oss-" + o.size},
                   {"dense", o.dense},
                   {"quant", o.measurement.quant},
                   {"context", o.measurement.context},
                   {"tokens", o.measurement.tokens},
                   {"token", as_json(t.token)},
                   {"prompt_ms_of_16", t.prompt_ms},
                   {"first_token_ms", t.first_token_ms},
                   {"token_bytes", t.token_bytes},
                   {"prefiltered_bytes", t.prefiltered_bytes},
                   {"screened_bytes", t.prefiltered_bytes},
                   {"weight_bytes", t.weight_bytes},
                   {"read_TBps", t.read_TBps},
                   {"phases_us", phases},
                   {"stages", stages}};
  add_contexts(json, t);
  if (o.measurement.grid_barriers) json["grid_barriers"] = {{"idle", as_json(t.idle)}, {"loaded", as_json(t.loaded)}};
  if (!t.sequences.empty()) {
    OrderedJson steps = OrderedJson::array();
    for (const BatchedStepTimes& s : t.sequences)
      steps.push_back({{"sequences", s.sequences},
                       {"streams", s.sequences},  // the earlier name, for one version
                       {"row_kernel", s.row_kernel},
                       {"in_use", s.in_use},
                       {"mean_ms", s.step.mean_ms},
                       {"p50_ms", s.step.p50_ms},
                       {"p99_ms", s.step.p99_ms},
                       {"best_ms", s.step.best_ms},
                       {"experts_a_layer", s.experts},
                       {"step_bytes", s.step_bytes}});
    json["sequences"] = json["streams"] = steps;  // "streams" is the earlier name, for one version
  }
  for (const SharedTimes& s : t.shared) json["shared"].push_back(as_json(s, o.measurement.split));
  return json;
}

// --- a model as `generate` runs it: the context is fed, then greedy tokens follow one after the other

using Clock = std::chrono::steady_clock;
double ms_since(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}
constexpr int64_t kFirst = 1 + 4;  // tokens before the timed ones: that of the prompt, and some to warm up

struct ModelShapes {
  DecoderSpec spec;
  DecoderWeights weights;  // without their memory
};
ModelShapes read_shapes(const std::string& path) {
  if (is_family(path)) {
    const DecoderSpec spec = read_family_spec(path);
    return {spec, family_shapes(path, spec)};
  }
  const GptOssConfig config = read_gpt_oss_config(path);
  return {spec_of(config), gpt_oss_shapes(path, config)};
}

// The bytes of weights and keys that a token reads on the CPU.
int64_t bytes_of_token(const ModelShapes& of, int64_t context) {
  const DecoderSpec& c = of.spec;
  const auto bytes = [&](const WeightMatrix& m) {
    return !m ? 0 : weight_bytes(m.format, m.rows(), m.cols()) * (m.is_bank() ? c.experts_per_token : 1);
  };
  int64_t sum = bytes(of.weights.head);
  for (size_t l = 0; l < c.layer.size(); ++l) {
    const DecoderLayer& y = of.weights.layers[l];
    const int64_t window = c.layer[l].window;
    for (const WeightMatrix* m : {&y.qkv, &y.o, &y.router, &y.gate_up, &y.down}) sum += bytes(*m);
    sum += 2 * 4 * c.kv_width() * (window > 0 ? std::min(window, context) : context);
  }
  return sum;
}

// Feeds ids that are far apart, so that tokens go to different experts.
void feed_prompt(Decoder& d, int slot, int64_t length) {
  std::vector<int32_t> ids;
  d.rewind(slot, 0);
  for (int64_t at = 0; at < length; at += int64_t(ids.size())) {
    ids.resize(size_t(std::min(d.batch(), length - at)));
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = int32_t(((at + int64_t(i)) * 7919 + 13) % d.vocab());
    if (!d.extend(slot, ids)) fail(ErrorCode::interrupted, "stopped in a prompt of ", length, " tokens");
  }
}
// Samples `tokens` tokens and appends to `at` the milliseconds from `begin` to each token.
void sample_tokens(Decoder& d, int slot, const SamplingOptions& sampling, int64_t tokens, Clock::time_point begin,
                   std::vector<double>& at) {
  (void)d.sample(slot,
                 {.sampling = sampling,
                  .on_token =
                      [&](int32_t) {
                        at.push_back(ms_since(begin));
                        return true;
                      }},
                 tokens);
}
// The milliseconds from the prompt's first token to each token of the answer.
std::vector<double> time_answer(Decoder& d, int slot, int64_t prompt, int64_t tokens,
                                const SamplingOptions& sampling = {.temperature = 0}) {
  std::vector<double> at;
  const int rounds = d.device().kind == Device::cuda ? 2 : 1;  // the first round records the CUDA graphs
  for (int i = 0; i < rounds; ++i) {
    at.clear();
    const auto begin = Clock::now();
    feed_prompt(d, slot, prompt);
    sample_tokens(d, slot, sampling, tokens, begin, at);
  }
  return at;
}
TokenTimes times_of(const std::vector<double>& at) {
  std::vector<double> ms;
  for (size_t i = size_t(kFirst); i < at.size(); ++i) ms.push_back(at[i] - at[i - 1]);
  std::sort(ms.begin(), ms.end());
  return {.mean_ms = (at.back() - at[size_t(kFirst) - 1]) / double(ms.size()),
          .p50_ms = ms[ms.size() / 2],
          .p99_ms = ms[ms.size() * 99 / 100],
          .best_ms = ms[0]};
}

constexpr struct {
  const char* name;
  SamplingOptions options;
} kSamplings[] = {{"greedy", {.temperature = 0}},
                  {"temperature 1", {}},
                  {"top-p 0.9", {.top_p = 0.9}},
                  {"top-k 40, min-p 0.05", {.top_k = 40, .min_p = 0.05}}};

// On a GPU each kind of sampling begins after the same context. A CPU, which would need long to compute the context
// again, continues the answer in the slot.
SampledTimes measure_sampled(Decoder& d, int slot, int64_t gpus, int64_t context, int64_t tokens) {
  SampledTimes found{.gpus = gpus};
  for (const auto& [name, sampling] : kSamplings) {
    std::vector<double> at;
    if (d.device().kind == Device::cuda)
      at = time_answer(d, slot, context, kFirst + tokens, sampling);
    else
      sample_tokens(d, slot, sampling, kFirst + tokens, Clock::now(), at);
    found.token.emplace_back(name, times_of(at));
  }
  return found;
}
// The same with random weights, through the interface that generation uses.
std::vector<SampledTimes> measure_sampled(const DecodeBench& o) {
  const DecodeMeasurement& m = o.measurement;
  std::vector<SampledTimes> all;
  if (is_family_size(o.size)) {
    const DecoderSpec spec = measured_spec(o.size);
    const std::unique_ptr<Decoder> d = make_synthetic_gpu_decoder(
        spec, decode::shapes_of(spec, m.dense, m.dense),
        {.context = m.context + kFirst + m.tokens, .device = DeviceChoice::cuda, .megakernel = m.megakernel}, 1);
    return {measure_sampled(*d, d->open(), 1, m.context, m.tokens)};
  }
  for (const int64_t gpus : m.gpus.empty() ? std::vector<int>{1} : m.gpus) {
    const OpenedModel model =
        ingot::open_model("synthetic:" + o.size + ":" + o.dense, {.context = m.context + kFirst + m.tokens,
                                                                  .device = DeviceChoice::cuda,
                                                                  .gpus = gpus,
                                                                  .split = m.split,
                                                                  .e4m3_experts = m.quant});
    all.push_back(measure_sampled(*model.decoder, model.decoder->open(), gpus, m.context, m.tokens));
  }
  return all;
}

int64_t gpus_of_model(const DecodeBench& o) {
  const std::vector<int64_t> counts = numbers_in("--gpus", o.gpus);
  if (counts.size() > 1)
    fail(ErrorCode::usage, "--gpus: found ", o.gpus, " with --model, expected one number: a model is opened once");
  return counts.empty() ? 1 : counts[0];
}

struct ModelTimes {
  DecodeTimes times;
  std::vector<SampledTimes> sampled;
  std::string device;
};
ModelTimes measure_model(const DecodeBench& o) {
  require_published(o.model);
  const DecodeMeasurement& m = o.measurement;
  int64_t longest = m.context;
  for (const int64_t context : m.contexts) longest = std::max(longest, context);
  longest += (1 + (o.kernels_alone ? 0 : std::ssize(kSamplings))) * (kFirst + m.tokens);
  for (const auto& [prompt, tokens] : m.answers) longest = std::max(longest, prompt + tokens);
  const std::string options = o.kernels_alone ? "" : " (--kernels-alone needs fewer tokens)";
  const OpenedModel model = open_model(
      o.model, longest, "--context, --tokens, --contexts and --answers" + options,
      {.device = device_named(o.device), .gpus = gpus_of_model(o), .split = m.split, .e4m3_experts = m.quant});
  Decoder& d = *model.decoder;
  const bool on_gpu = d.device().kind == Device::cuda;
  const ModelShapes shapes = read_shapes(o.model);
  // The number of bytes that a GPU reads depends on data that the decoder does not report, such as the division into
  // heads and parts.
  const auto bytes = [&](int64_t context) { return on_gpu ? 0 : bytes_of_token(shapes, context); };
  ModelTimes found{.times = {.weight_bytes = model.weight_bytes},
                   .device = on_gpu ? gpu::device_info(d.device().index).name : "CPU"};
  DecodeTimes& t = found.times;
  const int slot = d.open();
  const std::string path = on_gpu ? "cuda" : "cpu";
  std::vector<double> at = time_answer(d, slot, m.context, kFirst + m.tokens);
  t.first_token_ms = at[0], t.token_bytes = bytes(m.context);
  t.token.emplace_back(path, times_of(at));
  if (!o.kernels_alone) found.sampled.push_back(measure_sampled(d, slot, gpus_of_model(o), m.context, m.tokens));
  for (const int64_t context : m.contexts) {
    at = time_answer(d, slot, context, kFirst + m.tokens);
    t.contexts.push_back({.context = context, .token = {{path, times_of(at)}}, .token_bytes = bytes(context)});
  }
  for (const auto& [prompt, tokens] : m.answers) {
    at = time_answer(d, slot, prompt, tokens);
    t.answers.push_back({.prompt = prompt, .tokens = tokens, .first_token_ms = at[0], .whole_ms = at.back()});
  }
  return found;
}

void bench_model(const DecodeBench& o) {
  const ModelTimes found = measure_model(o);
  const DecodeTimes& t = found.times;
  if (o.json) {
    OrderedJson json{{"version", version()},
                     {"commit", commit()},
                     {"device", found.device},
                     {"gpus", gpus_of_model(o)},
                     {"model", o.model},
                     {"quant", o.measurement.quant},
                     {"context", o.measurement.context},
                     {"tokens", o.measurement.tokens},
                     {"token", as_json(t.token)},
                     {"first_token_ms", t.first_token_ms},
                     {"token_bytes", t.token_bytes},
                     {"weight_bytes", t.weight_bytes}};
    add_contexts(json, t);
    add_sampled(json, found.sampled);
    return write_out(show_json(json) + "\n");
  }
  const int64_t gpus = gpus_of_model(o);
  write_out(o.model + ", " + found.device + (gpus > 1 ? " and " + std::to_string(gpus - 1) + " more" : "") + ", " +
            with_commas(o.measurement.context) + " tokens of context, " + fixed(double(t.weight_bytes) * 1e-9, 1) +
            " GB of weights\n");
  if (t.token_bytes > 0) write_out("a token reads " + fixed(double(t.token_bytes) * 1e-9, 3) + " GB\n");
  print_paths(t, 0);
  for (const SampledTimes& s : found.sampled) print_sampled(s, {});
  print_contexts(t);
  write_out("time to first token: " + fixed(t.first_token_ms, 1) + " ms\n");
}

}  // namespace

void add_bench_decode(Command& bench) {
  Command& c = bench.add("decode",
                         "Times a token of a published model, or on a GPU of random weights in the published shapes of "
                         "GPT-OSS, Llama, Qwen3 and SmolLM2");

  auto o = std::make_shared<DecodeBench>();
  c.text("--model PATH", o->model,
         "a checkpoint, an archive or a GGUF file, timed as in generation after a prompt that fills the context "
         "(default: random "
         "weights)");
  add_device(c, o->device);
  std::vector<std::string> sizes{"20b", "120b"};
  sizes.insert(sizes.end(), synthetic_family_names().begin(), synthetic_family_names().end());
  c.choice("--synthetic SIZE", o->size, sizes, "the published model whose shapes are used (default: 120b)");
  c.choice("--dense FORM", o->dense, {"bf16", "fp8", "mxfp4"},
           "format of all matrices (default: bf16); GPT-OSS's experts are always mxfp4");
  c.integer("--context N", o->measurement.context, 1, 130000,
            "tokens of context before the first timed token (default: 1024)");
  c.integer("--tokens N", o->measurement.tokens, 1, 100000, "number of timed tokens (default: 200)");
  c.flag("--phased", o->phased, "time only the phased path, with one launch per phase (default: both paths)");
  c.flag("--megakernel", o->megakernel, "time only the megakernel, with one launch per token");
  c.flag("--kernels-alone", o->kernels_alone,
         "do not also time sampled tokens through the decoder, as `generate` gets them");
  c.flag("--phases", o->measurement.phases, "also time each phase by itself, and the megakernel's stages");
  c.text("--trace FILE", o->measurement.trace,
         "write the times of a token of the megakernel, each stage on each SM, for ui.perfetto.dev");
  c.flag("--prompt", o->measurement.prompt,
         "feed a prompt that fills the context, and print the time to the first token (default: keys and values are "
         "random)");
  c.flag("--grid-barriers", o->measurement.grid_barriers, "also time grid barriers between all SMs by themselves");
  c.text("--contexts LIST", o->contexts, "also time tokens at these contexts, such as 8192,32768");
  c.text("--answers LIST", o->answers,
         "also time whole answers, given as tokens of prompt and answer, such as 1024:100");
  c.text("--sequences LIST", o->sequences, "also time steps of these numbers of sequences at once, such as 1,8,16,64")
      .earlier_name("streams");
  c.integer("--small-batch N", o->measurement.small_batch, 0, 16,
            "with --sequences: steps of more than N sequences use the matrix kernels (default: the number that was "
            "fastest in measurements)");
  add_gpu_counts(c, o->gpus, o->measurement.split);
  add_quant(c, o->measurement.quant);
  c.flag("--json", o->json, "print one JSON object");
  c.examples(R"(  ingot bench decode
  ingot bench decode --synthetic 20b --dense fp8 --context 8192 --phases
  ingot bench decode --gpus 2,4
  ingot bench decode --model model.ingot --device cpu --tokens 20
  ingot bench decode --sequences 1,2,4,8
  ingot bench decode --synthetic llama-3.2-1b --context 32 --answers 32:128
  ingot bench decode --trace token.json)");
  c.run([o, &c] {
    o->measurement.gpus = gpu_counts(o->gpus);
    refuse_split_of_one(c, o->measurement.gpus.empty() ? 1 : o->measurement.gpus[0]);
    if (o->model.empty() && o->device == "cpu")
      fail(ErrorCode::usage,
           "--device: found cpu without --model, expected one: random weights are made on a GPU, or by `ingot convert "
           "--synthetic`");
    if (!o->model.empty())
      c.refuse_given({"synthetic", "dense", "phased", "megakernel", "phases", "trace", "prompt", "grid-barriers",
                      "sequences", "small-batch"},
                     "--model");
    o->measurement.size = o->size;
    o->measurement.dense = o->dense == "bf16"  ? WeightFormat::bf16
                           : o->dense == "fp8" ? WeightFormat::fp8
                                               : WeightFormat::mxfp4;
    if (o->phased != o->megakernel) o->measurement.phased = o->phased, o->measurement.megakernel = o->megakernel;
    o->measurement.sequences = numbers_in("--sequences", o->sequences);
    o->measurement.contexts = numbers_in("--contexts", o->contexts);
    const std::vector<int64_t> answers = numbers_in("--answers", o->answers, true);
    for (size_t i = 0; i < answers.size(); i += 2) o->measurement.answers.emplace_back(answers[i], answers[i + 1]);
    if (!o->model.empty()) return bench_model(*o);
#ifndef INGOT_CUDA_BUILD
    fail(ErrorCode::unsupported,
         "found a build without CUDA, expected one made with INGOT_CUDA=ON, as random weights are made on a GPU; "
         "--model PATH times a model on a CPU too");
#endif
    const DecodeTimes times = measure_decode(o->measurement);
    if (!o->json) print_times(*o, times);
    const std::vector<SampledTimes> sampled = o->kernels_alone || o->phased || !o->measurement.trace.empty()
                                                  ? std::vector<SampledTimes>()
                                                  : measure_sampled(*o);
    if (!o->json) {
      for (const SampledTimes& s : sampled) print_sampled(s, kernels_of(times, s.gpus));
      return;
    }
    OrderedJson json = as_json(*o, times);
    add_sampled(json, sampled);
    write_out(show_json(json) + "\n");
  });
}

}  // namespace ingot::cli
