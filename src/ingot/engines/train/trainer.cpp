#include "ingot/engines/train/trainer.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>

#include "ingot/core/cpu.h"
#include "ingot/core/log.h"
#include "ingot/core/memory.h"
#include "ingot/core/progress.h"
#include "ingot/core/thread_pool.h"
#include "ingot/core/version.h"
#include "ingot/data/prefetch.h"
#include "ingot/engines/train/device_batch.h"
#include "ingot/engines/train/pass_graphs.h"
#include "ingot/engines/train/shards.h"
#include "ingot/gpu/allocator.h"
#include "ingot/gpu/device.h"
#include "ingot/gpu/promised.h"
#include "ingot/io/checkpoint.h"
#include "ingot/io/json.h"
#include "ingot/kernels/adamw/adamw.h"
#include "ingot/kernels/axpby/axpby.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/copy/host_copy.h"
#include "ingot/kernels/sum/sum.h"
#include "ingot/models/gpt/flops.h"
#include "ingot/models/gpt/trained.h"

namespace ingot {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

constexpr double kLoadSeconds = 1800;   // that ranks may differ in reading their data, and that a save may take
constexpr int64_t kCompareEvery = 100;  // steps after which ranks compare their weights

Products products_of(const TrainOptions& o) { return products_named(o.products); }

// Of bf16 products in a second, without sparsity. 0: not known, as of every CPU.
double promised_flops(Device device) {
  if (device.kind == Device::cpu) return 0;
  return gpu::promised_bf16_flops(gpu::device_info(device.index).name);
}
// `whole` is the GPU's.
int64_t used_memory(Device device, int64_t whole) {
  return device.kind == Device::cpu ? resident_memory() : whole - gpu::memory_of(device).available();
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

// JSON has no word for a number that is not finite.
OrderedJson finite_or_null(double x) { return std::isfinite(x) ? OrderedJson(x) : OrderedJson(nullptr); }

// One JSON object a line. A full disk must not stop training: the first failure is reported and the rest stays silent.
class RunLog {
 public:
  // What a full disk or a kill cut off goes first: a line behind it would read as one with it.
  void open(const std::string& path) {
    file_ = File::append(path);
    const std::string before = read_file(path);
    if (!before.empty() && before.back() != '\n') file_.shorten(int64_t(before.rfind('\n') + 1));
  }
  void write(const OrderedJson& line) {
    if (!file_ || failed_) return;
    try {
      file_.write(show_json(line) + "\n");  // it names files
    } catch (const Error& e) {
      failed_ = true;
      log_warn("the log is incomplete from here on: ", e.what());
    }
  }

 private:
  File file_;
  bool failed_ = false;
};

}  // namespace

struct Trainer::Impl {
  RunConfig config;
  RunData data;
  std::string directory, command;
  Communicator* ranks;  // null: this process alone
  Lock lock;
  ParameterLayout layout;
  Device device;                                 // of all that a step touches
  std::unique_ptr<gpu::OwnedStream> own_stream;  // a GPU's: the default stream cannot be recorded
  Stream stream;
  GptTypes types;
  bool keep_rows = false;  // GptOptions
  Arena memory;
  Tensor weights, grads;
  Tensor compute;      // the weights as they are multiplied, where that is another type
  Tensor loss, dloss;  // (T) of one pass
  Tensor loss_sum;     // (1) f64: of one pass
  Tensor pass_losses;  // (passes of this rank) f64
  Tensor total;        // gradients of the passes so far, where there are several: each pass begins at zero
  Optimizer optimizer;
  GptFlops flops;         // of the model's program
  double step_flops = 0;  // of this rank's passes of the latest step
  DeviceBatch on_device;
  std::unique_ptr<Gpt> model;
  PassGraphs graphs;  // of the model
  std::shared_ptr<const Packer> packer;
  RunLog log;
  int64_t step = 0;
  double trained_seconds = 0;
  int failed_saves = 0, bad_steps = 0;
  std::string last_checkpoint;
  bool resumed = false;
  bool looped = false;    // the recurrence is on for good: it was when the weights were saved
  std::string init_hash;  // of the parameters that training began with, where they are another run's

  Impl(const RunConfig& c, RunData d, const std::string& dir, const std::string& cmd, const ResumeFrom& from,
       Device where, Communicator* others)
      : config(c),
        data(std::move(d)),
        directory(others == nullptr || others->rank() == 0 ? dir : ""),
        command(cmd),
        ranks(others != nullptr && others->world() > 1 ? others : nullptr),
        layout(c.model),
        device(where),
        own_stream(stream_on(where)),
        stream(own_stream ? Stream(*own_stream) : Stream()),
        types(gpt_types(where)),
        memory(2 * (layout.padded_count() + c.train.batch_tokens) * 4 + total_bytes() + passes() * 8 + compute_bytes() +
                   8 * Arena::kAlign,
               gpu::memory_of(device)),
        weights(memory.take(DType::f32, {layout.padded_count()})),
        grads(memory.take(DType::f32, {layout.padded_count()})),
        compute(compute_bytes() > 0 ? memory.take(types.compute, {layout.padded_count()}) : Tensor()),
        loss(memory.take(DType::f32, {c.train.batch_tokens})),
        dloss(memory.take(DType::f32, {c.train.batch_tokens})),
        loss_sum(memory.take(DType::f64, {1})),
        pass_losses(memory.take(DType::f64, {passes()})),
        total(total_bytes() > 0 ? memory.take(DType::f32, {layout.padded_count()}) : Tensor()),
        optimizer(layout, DType::f32, c.train.optimizer, c.train.schedule.ema_horizon > 0,
                  {.device = device, .stream = stream, .ranks = ranks, .graphs = c.train.cuda_graphs}),
        on_device(device, stream, c.train.batch_tokens),
        graphs(stream, device.kind == Device::cuda && c.train.cuda_graphs) {
    check(config.train);
    if (ranks != nullptr) meet_ranks();
    if (config.train.order == "windows" && config.train.batch_tokens % config.model.context != 0)
      fail(ErrorCode::usage, "train.batch_tokens: found ", config.train.batch_tokens,
           ", expected a multiple of model.context, ", config.model.context, ", as train.order is windows");
    require_memory(memory.capacity() + optimizer.bytes(), detail::concat("training ", layout.count(), " parameters"),
                   gpu::memory_of(device));
    keep_rows_if_they_fit();
    require_room_for_passes();
    fill({.to = dloss, .value = 1.0 / double(config.train.batch_tokens * config.train.accumulation)}, stream);
    packer = std::make_shared<Packer>(data.train, PackOptions{.order = batch_order(config.train.order),
                                                              .tokens = config.train.batch_tokens,
                                                              .max_segment = config.model.context,
                                                              .seed = config.train.seed});
    initialise_weights();
    const std::optional<Checkpoint> found = directory.empty() ? std::nullopt : find_run(from);
    if (!found && !config.train.init_from.empty() && rank() == 0) take_weights_of(config.train.init_from);
    optimizer.start_average(weights);
    if (!directory.empty()) enter_directory(found);
    if (ranks != nullptr) share_state();
    if (compute) copy({.from = weights, .to = compute}, stream);
  }

  static std::unique_ptr<gpu::OwnedStream> stream_on(Device device) {
    if (device.kind == Device::cpu) return nullptr;
    const gpu::DeviceGuard guard(device.index);
    return std::make_unique<gpu::OwnedStream>();
  }
  int64_t compute_bytes() const {
    return types.compute == types.master ? 0 : layout.padded_count() * size_of(types.compute);
  }
  int64_t world() const { return ranks != nullptr ? ranks->world() : 1; }
  int64_t rank() const { return ranks != nullptr ? ranks->rank() : 0; }
  // Of a step, by this rank. A step's passes are dealt in blocks, so that sums in the order of ranks are in theirs.
  int64_t passes() const { return config.train.accumulation / world(); }
  int64_t total_bytes() const { return passes() > 1 ? layout.padded_count() * 4 : 0; }
  GptWeights all_weights() const { return {weights, compute}; }
  // Matrices' updates are iterated in bf16 on a GPU: that is what the method is known for.
  Products optimizer_products() const { return compute ? Products::bf16 : products_of(config.train); }

  GptOptions options_of(bool loop, int64_t tokens) const {
    return {.capacity = tokens,
            .looping = loop,
            .training = true,
            .keep_rows = keep_rows,
            .products = products_of(config.train),
            .device = device,
            .stream = stream};
  }
  // Of all layer programs.
  int64_t planned_bytes(int64_t tokens) const {
    int64_t most = Gpt::planned_bytes(config.model, types, options_of(false, tokens));
    if (config.model.has_loop())
      most = std::max(most, Gpt::planned_bytes(config.model, types, options_of(true, tokens)));
    return most;
  }
  // Some memory stays free for libraries, graphs, and whoever else is on the GPU.
  void keep_rows_if_they_fit() {
    constexpr int64_t kFree = int64_t(2) << 30;
    if (device.kind == Device::cpu || !config.train.keep_activations) return;
    const int64_t available = gpu::memory_of(device).available();
    keep_rows = true;
    keep_rows = planned_bytes(config.train.batch_tokens) + kFree <= available;
  }
  // Before the first step: what does not fit is not found out in the middle of the run.
  void require_room_for_passes() const {
    const auto bytes = [&](int64_t tokens) { return planned_bytes(tokens); };
    const int64_t tokens = config.train.batch_tokens, needed = bytes(tokens);
    const int64_t available = gpu::memory_of(device).available();
    if (available < 0 || needed <= available) return;
    const int64_t unit = config.train.order == "windows" ? config.model.context : 64;
    const int64_t fit = tokens_that_fit(tokens, unit, available, bytes);
    const std::string where = device.kind == Device::cpu ? "" : detail::concat(" on ", device);
    fail(ErrorCode::unsupported, "training on ", tokens, " tokens at once needs ", format_bytes(double(needed)),
         " of memory", where, ", found ", format_bytes(double(available)), " available, expected ",
         fit > 0 ? detail::concat("train.batch_tokens of at most ", fit) : "a smaller model");
  }

  // --- ranks ---
  // Before anything is written: all are in the same run of the same program.
  void meet_ranks() {
    if (config.train.accumulation % world() != 0)
      fail(ErrorCode::usage, "train.accumulation: found ", config.train.accumulation,
           " passes per step, expected a multiple of ", world(), ", the number of ranks that share them");
    const std::pair<const char*, std::string> same[] = {{"configuration", to_json(config)},
                                                        {"training data", data.train->fingerprint()},
                                                        {"held-out data", data.held_out->fingerprint()},
                                                        {"tokenizer", std::to_string(data.tokenizer->hash())},
                                                        {"version", std::string(version()) + " " + commit()},
                                                        {"device", device.kind == Device::cuda ? "gpu" : "cpu"},
                                                        {"CPU level", name_of(cpu_level())}};
    ranks->barrier(kLoadSeconds);
    for (const auto& [what, text] : same) {
      std::string bytes = text;
      const uint64_t mine = hash_of_bits(Tensor(bytes.data(), DType::u8, {int64_t(bytes.size())}));
      check_same(mine, [&](int64_t r) {
        fail(ErrorCode::usage, "rank ", r, ": found another ", what, " than rank 0's, expected the same on every rank");
      });
    }
  }
  // Calls refuse(rank) for the first rank that differs from rank 0.
  template <class Refuse> void check_same(uint64_t mine, Refuse&& refuse) const {
    std::vector<uint64_t> all(static_cast<size_t>(world()));
    ranks->gather_bytes(&mine, sizeof mine, all.data());
    for (size_t r = 1; r < all.size(); ++r)
      if (all[r] != all[0]) refuse(int64_t(r));
  }
  // Rank 0 has what a checkpoint or another run gave.
  void share_state() {
    struct {
      int64_t step;
      double trained_seconds;
      int64_t looped, resumed;
    } at{step, trained_seconds, looped, resumed};
    ranks->barrier(kLoadSeconds);
    ranks->broadcast_bytes(&at, sizeof at, 0);
    step = at.step, trained_seconds = at.trained_seconds, looped = at.looped != 0, resumed = at.resumed != 0;
    ranks->broadcast(weights, 0, stream);
    for (const NamedState& s : optimizer.state()) ranks->broadcast(s.tensor, 0, stream);
    ranks->wait(stream);
  }
  void compare_weights() const {
    if (ranks == nullptr) return;
    check_same(hash_of_bits(HostCopy(weights, stream).tensor()), [&](int64_t r) {
      fail(ErrorCode::numeric, "rank ", r, ": found weights that are not rank 0's after step ", step,
           ", expected the same bits on every rank. The last checkpoint is ",
           last_checkpoint.empty() ? "rank 0's" : last_checkpoint);
    });
  }
  bool anyone(bool mine) const {
    if (ranks == nullptr) return mine;
    std::vector<char> all(static_cast<size_t>(world()));
    const char word = mine;
    ranks->gather_bytes(&word, 1, all.data());
    return std::any_of(all.begin(), all.end(), [](char c) { return c != 0; });
  }
  template <class T> T as_rank_0(T mine) const {
    if (ranks != nullptr) ranks->broadcast_bytes(&mine, sizeof mine, 0);
    return mine;
  }

  // --- from another run ---
  void take_weights_of(const std::string& path) {
    const TrainedModel other = load_trained(path);
    const auto refuse = [&](const auto&... what) { fail(ErrorCode::usage, "train.init_from: ", path, ": ", what...); };
    if (other.tokenizer->hash() != data.tokenizer->hash())
      refuse("found a model of another tokenizer, expected this run's; ", other.tokenizer_file, " is the model's");
    const ParameterLayout theirs(other.config);
    if (theirs.all().size() != layout.all().size())
      refuse("found a model of ", theirs.all().size(), " tensors, expected ", layout.all().size(),
             " as this configuration has");
    const HostCopy here(weights, stream);
    for (size_t i = 0; i < layout.all().size(); ++i) {
      const Parameter &a = theirs.all()[i], &b = layout.all()[i];
      const Tensor from = theirs.view(other.weights, a), to = layout.view(here.tensor(), b);
      if (a.name != b.name || from.shape != to.shape)
        refuse("found the tensor ", a.name, " of ", from.shape, ", expected ", b.name, " of ", to.shape,
               " as this configuration has");
      std::copy_n(static_cast<const float*>(from.data), from.numel(), static_cast<float*>(to.data));
    }
    here.write_back();
    looped = other.looping;
    init_hash = other.parameter_hash;
    log_info("starting with the weights of ", other.checkpoint);
  }

  void initialise_weights() const {
    const HostCopy here(weights, stream);
    initialise(config.model, layout, here.tensor(), config.train.seed);
    here.write_back();
  }

  // --- the run directory ---
  std::string path(const char* name) const { return join_path(directory, name); }
  // Writes nothing but the lock: what is refused later must not leave a run behind.
  std::optional<Checkpoint> find_run(const ResumeFrom& from) {
    create_directories(directory);
    lock = Lock(directory);
    if (exists(path("config.json"))) check_same_run(to_json(config) + "\n");
    if (!from.name.empty()) return named_checkpoint(directory, from.name);
    return from.last_good ? last_good_checkpoint(directory) : latest_checkpoint(directory);
  }
  void enter_directory(const std::optional<Checkpoint>& found) {
    const std::string text = to_json(config) + "\n";
    if (!exists(path("config.json"))) {
      write_file(path(data.tokenizer_name.c_str()), data.tokenizer_file);
      write_file(path("config.json"), text);  // last: its presence says that the directory is a run
    }
    if (found) {
      resume(*found);
      if (!by_time() && config.train.steps < step)
        fail(ErrorCode::usage, directory, ": found ", step, " steps done, expected a run of at least as many, not ",
             config.train.steps);
      log_info("resuming at step ", step, " from ", found->path());
      set_aside_after(directory, step);
    }
    if (read_file(path("config.json")) != text) write_file(path("config.json"), text);
    log.open(path("log.jsonl"));
    log_start();
  }
  // The length of a run may change when it is resumed; what defines its numbers may not.
  void check_same_run(const std::string& text) const {
    const std::string where = path("config.json");
    // Read as a configuration and written again: what an earlier version did not know has its default.
    Json before = parse_json(to_json(run_config_from_json(read_file(where), where)), where);
    Json now = parse_json(text, "the new configuration");
    for (Json* j : {&before, &now})
      for (const char* key : {"steps", "seconds", "reserve_seconds", "eval_every", "checkpoint_every", "log_every",
                              "keep_checkpoints", "keep_best", "keep_activations", "cuda_graphs"})
        (*j)["train"].erase(key);
    const Json patch = Json::diff(before, now);
    if (!patch.empty())
      fail(ErrorCode::usage, where, ": found another configuration in this run directory (first difference: ",
           patch[0]["path"].get<std::string>(), "), expected the same one to resume, or an empty directory");
    const std::string file = path(data.tokenizer_name.c_str());
    if (load_tokenizer(file)->hash() != data.tokenizer->hash())
      fail(ErrorCode::bad_data, file,
           ": found a tokenizer that is not the one of this data, expected the same one to resume");
  }
  void log_start() {
    OrderedJson line;
    line["event"] = step > 0 ? "resume" : "start";
    line["time"] = utc_now();
    line["version"] = version();
    line["commit"] = commit();
    line["command"] = command;
    line["cpu"] = cpu_model();
    line["cpu_level"] = name_of(cpu_level());
    line["threads"] = thread_count();
    if (ranks != nullptr) line["ranks"] = world();
    if (device.kind == Device::cuda) line["gpu"] = gpu::device_info(device.index).name;
    line["seed"] = config.train.seed;
    line["step"] = step;
    line["seconds"] = trained_seconds;
    if (!init_hash.empty()) line["init_parameter_hash"] = init_hash;
    line["parameters"] = layout.count();
    line["data"] = data.train->name();
    line["data_fingerprint"] = data.train->fingerprint();
    line["train_tokens"] = data.train->size();
    line["held_out_tokens"] = data.held_out->size();
    line["tokenizer_hash"] = data.tokenizer->hash();
    line["config"] = OrderedJson::parse(to_json(config));
    log.write(line);
  }

  // Everything a checkpoint holds, in host memory.
  struct HostState {
    explicit HostState(const Impl& m) : weights(m.weights, m.stream), result(m.result_weights(), m.stream) {
      for (const NamedState& s : m.optimizer.state())
        if (s.name != "ema.weights") state.emplace_back(s.name, HostCopy(s.tensor, m.stream));
    }
    void write_back() const {
      weights.write_back(), result.write_back();
      for (const auto& [name, copy] : state) copy.write_back();
    }
    HostCopy weights, result;
    std::vector<std::pair<std::string, HostCopy>> state;
  };
  Tensor result_weights() const { return optimizer.average() ? optimizer.average() : weights; }

  CheckpointContent content(const HostState& here) const {
    CheckpointContent c;
    c.model = named_tensors(layout, here.result.tensor());
    if (optimizer.average())
      for (NamedTensor& t : named_tensors(layout, here.weights.tensor(), "weights."))
        c.optimizer.push_back(std::move(t));
    for (const auto& [name, copy] : here.state) c.optimizer.push_back({name, copy.tensor()});
    OrderedJson state;
    state["step"] = step;
    state["trained_seconds"] = trained_seconds;
    state["looping"] = looping();
    state["data_fingerprint"] = data.train->fingerprint();
    state["tokenizer_hash"] = data.tokenizer->hash();
    state["parameter_hash"] = parameter_hash(layout, here.result.tensor());
    state["version"] = version();
    c.state_json = write_json(state, 2) + "\n";
    return c;
  }
  void resume(const Checkpoint& found) {
    const std::string where = found.path() + "/state.json";
    const Json state = parse_json(found.state_json(), where);
    Fields fields(state, where);
    std::string fingerprint;
    uint32_t hash = 0;
    fields.require("step", step);
    fields.require("trained_seconds", trained_seconds);
    fields.require("data_fingerprint", fingerprint);
    fields.require("looping", looped);
    fields.require("tokenizer_hash", hash);
    if (fingerprint != data.train->fingerprint())
      fail(ErrorCode::bad_data, where, ": found a run on other data (", fingerprint, "), expected ",
           data.train->fingerprint(), " of ", data.train->name());
    const HostState here(*this);
    CheckpointContent c = content(here);
    found.load_model(c.model);
    found.load_optimizer(c.optimizer);
    here.write_back();
    last_checkpoint = found.path();
    resumed = true;
  }
  // The checkpoint of this step is there. Trouble is reported and never stops training.
  void note_best(const Score& score) {
    if (directory.empty() || !config.train.keep_best) return;
    try {
      set_best_checkpoint(directory, {.step = step, .loss = score.loss, .bits_per_byte = score.bits_per_byte},
                          int(config.train.keep_checkpoints));
    } catch (const Error& e) { log_warn("the best checkpoint is not noted: ", e.what()); }
  }
  bool is_best(const Score& score) const {
    if (directory.empty() || !config.train.keep_best || !std::isfinite(score.loss)) return false;
    try {
      const auto best = best_checkpoint(directory);
      return !best || score.loss < best->loss;
    } catch (const Error& e) {
      log_warn("starting over with the best checkpoint: ", e.what());
      return true;
    }
  }
  bool is_best_of_all(const Score& score) const { return as_rank_0(is_best(score)); }
  // A failed save is reported and never stops training.
  bool save() {
    if (ranks == nullptr) return write_checkpoint();
    optimizer.gather_state();
    ranks->wait(stream);
    compare_weights();
    const bool saved = write_checkpoint();
    ranks->barrier(kLoadSeconds);
    return as_rank_0(saved);
  }
  bool write_checkpoint() {
    if (directory.empty()) return true;
    try {
      const HostState here(*this);
      if (!all_finite(here.weights.tensor())) {
        log_warn("not saving step ", step, ": the weights are not finite");
        return false;
      }
      last_checkpoint = save_checkpoint(directory, step, content(here), int(config.train.keep_checkpoints));
      log.write({{"event", "checkpoint"}, {"step", step}, {"path", last_checkpoint}});
      return true;
    } catch (const Error& e) {
      ++failed_saves;
      log_warn(e.what(), done() ? "" : "; training goes on");
      log.write({{"event", "checkpoint_failed"}, {"step", step}, {"error", e.what()}});
      return false;
    }
  }

  // --- progress ---
  bool by_time() const { return config.train.seconds > 0; }
  double budget() const { return config.train.seconds - config.train.reserve_seconds; }
  double progress() const {
    if (by_time()) return std::min(1.0, trained_seconds / budget());
    return config.train.steps > 0 ? double(step) / double(config.train.steps) : 1;
  }
  int64_t expected_steps() const {
    if (!by_time()) return config.train.steps;
    const double p = progress();
    return p > 0.01 ? int64_t(double(step) / p) : std::max<int64_t>(step + 1, 100);
  }
  bool done() const { return by_time() ? trained_seconds >= budget() : step >= config.train.steps; }
  // Once on it stays on, also where a longer run is less far.
  bool looping() const { return config.model.has_loop() && (looped || progress() >= config.model.loop_from); }

  // --- one step ---
  void forget_model() {
    graphs.clear();  // they read its memory
    model.reset();
  }
  Gpt& bound_model(bool loop) {
    if (!model || model->options().looping != loop) {
      forget_model();  // its memory first
      flops = forward_flops(config.model, loop);
      model = std::make_unique<Gpt>(config.model, types, options_of(loop, config.train.batch_tokens));
    }
    return *model;
  }
  // This rank's passes of steps from the next one on.
  Prefetch batches_ahead() const {
    const int64_t here = passes(), all = config.train.accumulation, first = rank() * here;
    return Prefetch(
        [p = packer, here, all, first](int64_t i, Batch& into) { p->fill(i / here * all + first + i % here, into); },
        step * here);
  }
  // Leaves this rank's gradients in step_grads() and the sums of losses in `pass_losses`.
  void forward_backward(Prefetch& batches, bool loop) {
    Gpt& gpt = bound_model(loop);
    step_flops = 0;
    Batch batch;
    for (int64_t a = 0; a < passes(); ++a) {
      fill({.to = grads}, stream);
      fill({.to = loss_sum}, stream);
      batches.next(batch);
      step_flops += 3 * (flops.per_token * double(batch.size()) +
                         flops.per_pair * attended_pairs(batch.cu_seqlens, config.model.window));
      const auto part = [&](const Tensor& t) { return t.slice(0, 0, batch.size()); };
      const TokenBatch there = on_device.put(batch);
      graphs.run({batch.size(), there.cu_seqlens.numel() - 1}, [&] {
        gpt.losses_and_gradients(all_weights(), there, part(dloss), part(loss), grads);
        sum({.x = part(loss), .total = loss_sum}, stream);
      });
      copy({.from = loss_sum, .to = pass_losses.slice(0, a, a + 1)}, stream);
      if (total && a == 0) copy({.from = grads, .to = total}, stream);
      if (total && a > 0) axpby({.x = grads, .y = total}, stream);
    }
  }
  const Tensor& step_grads() const { return total ? total : grads; }
  // Over all ranks, added in the order of passes.
  double mean_loss() const {
    const HostCopy mine(pass_losses, stream);
    std::vector<double> all(size_t(config.train.accumulation));
    if (ranks != nullptr)
      ranks->gather_bytes(mine.tensor().data, mine.tensor().bytes(), all.data());
    else
      std::copy_n(mine.tensor().ptr<double>(), all.size(), all.data());
    double sum = 0;
    for (const double x : all) sum += x;
    return sum / double(config.train.batch_tokens * config.train.accumulation);
  }
  TrainStatus train_step(Prefetch& batches) {
    const auto start = Clock::now();
    TrainStatus s;
    const double p = progress();
    s.looping = looping();
    s.lr_factor = learning_rate_factor(config.train.schedule, p, step, expected_steps());
    forward_backward(batches, s.looping);
    OptimizerStep at{.step = step + 1,
                     .lr_factor = s.lr_factor,
                     .momentum = muon_momentum(config.train.schedule, p),
                     .products = optimizer_products()};
    if (optimizer.average()) at.ema = ema_decay(config.train.schedule, double(expected_steps()));
    optimizer.step(all_weights(), step_grads(), at);
    if (ranks != nullptr) ranks->wait(stream);
    s.loss = mean_loss();  // the step's only wait
    s.grad_norm = read_number(optimizer.gradient_norm(), stream);
    note_bad_step(s);
    ++step;
    trained_seconds = as_rank_0(trained_seconds + seconds_since(start));
    if (step % kCompareEvery == 0) compare_weights();
    s.step = step;
    s.steps = expected_steps();
    s.progress = progress();
    s.seconds = trained_seconds;
    return s;
  }
  // The first parameter, over all ranks, whose gradient is not finite.
  std::string broken_tensor() const {
    const HostCopy here(step_grads(), stream);
    const auto& all = layout.all();
    const auto broken = std::find_if(all.begin(), all.end(),
                                     [&](const Parameter& p) { return !all_finite(layout.view(here.tensor(), p)); });
    int64_t first = broken - all.begin();
    std::vector<int64_t> firsts(static_cast<size_t>(world()), first);
    if (ranks != nullptr) ranks->gather_bytes(&first, sizeof first, firsts.data());
    first = *std::min_element(firsts.begin(), firsts.end());
    return first < int64_t(all.size()) ? all[size_t(first)].name : "a sum of finite numbers";
  }
  void note_bad_step(const TrainStatus& s) {
    if (std::isfinite(s.grad_norm)) {
      bad_steps = 0;
      return;
    }
    const std::string where = std::isfinite(s.loss) ? "the gradient of " + broken_tensor() : "the loss";
    if (rank() == 0)
      log_warn("step ", step, ": the gradient's norm is ", s.grad_norm, ", found first in ", where,
               "; the step is skipped");
    if (++bad_steps >= config.train.max_bad_steps)
      fail(ErrorCode::numeric, "training stopped at step ", step, ": found ", bad_steps,
           " steps in a row whose gradient is not finite, the last time in ", where,
           "; expected finite numbers. The last checkpoint is ", last_checkpoint.empty() ? "none" : last_checkpoint);
  }

  Score score_on_held_out() const {
    const Products products = products_of(config.train);
    // The average has no copy in the products' type; that of the weights is theirs again after this.
    const Tensor result = result_weights();
    const bool other = compute && result.data != weights.data;
    if (other) copy({.from = result, .to = compute}, stream);
    const Score s = score(config.model, {result, compute}, *data.tokenizer, data.held_out,
                          {.batch_tokens = config.train.batch_tokens,
                           .looping = looping(),
                           .products = products,
                           .stream = stream,
                           .ranks = ranks});
    if (other) copy({.from = weights, .to = compute}, stream);
    return s;
  }
  void log_step(const TrainStatus& s) {
    log.write({{"event", "step"},
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
               {"seconds", s.seconds}});
  }
  void log_score(const Score& x) {
    log.write({{"event", "score"},
               {"step", step},
               {"loss", finite_or_null(x.loss)},
               {"bits_per_byte", finite_or_null(x.bits_per_byte)},
               {"targets", x.targets},
               {"bytes", x.bytes},
               {"scoring_seconds", x.seconds},
               {"seconds", trained_seconds}});
  }
};

Trainer::Trainer(const RunConfig& config, RunData data, const std::string& directory, const std::string& command,
                 const ResumeFrom& from, Device device, Communicator* ranks)
    : impl_(std::make_unique<Impl>(config, std::move(data), directory, command, from, device, ranks)) {}
Trainer::~Trainer() = default;
int64_t Trainer::step() const { return impl_->step; }
const RunConfig& Trainer::config() const { return impl_->config; }
const RunData& Trainer::data() const { return impl_->data; }
bool Trainer::looping() const { return impl_->looping(); }
Device Trainer::device() const { return impl_->device; }
int64_t Trainer::replayed_passes() const { return impl_->graphs.replays(); }
Tensor Trainer::weights() const { return impl_->weights; }
Tensor Trainer::result_weights() const { return impl_->result_weights(); }
int64_t Trainer::parameter_count() const { return impl_->layout.count(); }

void Trainer::set_steps(int64_t steps) {
  INGOT_CHECK_EQ(impl_->step, int64_t(0), "trainer: steps can be set before the first step only");
  impl_->config.train.steps = steps;
  if (!impl_->directory.empty()) write_file(impl_->path("config.json"), to_json(impl_->config) + "\n");
}

double Trainer::measure_tokens_per_second(double seconds) {
  Impl& m = *impl_;
  // Whole steps, optimizer included; everything they change is put back.
  std::vector<Tensor> changed{m.weights};  // its copy follows from it
  for (const NamedState& s : m.optimizer.state()) changed.push_back(s.tensor);
  int64_t bytes = 0;
  for (const Tensor& t : changed) bytes += Arena::aligned(t.bytes());
  Arena kept(bytes, gpu::memory_of(m.device));
  std::vector<Tensor> before;
  for (const Tensor& t : changed) {
    before.push_back(kept.take(t.dtype, t.shape));
    copy({.from = t, .to = before.back()}, m.stream);
  }
  Prefetch batches = m.batches_ahead();
  const auto whole_step = [&] {
    m.forward_backward(batches, m.looping());
    m.optimizer.step(m.all_weights(), m.step_grads(), {.step = m.step + 1, .products = m.optimizer_products()});
    gpu::synchronize(m.device, m.stream);
  };
  whole_step();  // the first touches memory
  int64_t tokens = 0;
  const auto start = Clock::now();
  do {
    whole_step();
    tokens += m.config.train.batch_tokens * m.config.train.accumulation;
  } while (seconds_since(start) < seconds);
  const double rate = double(tokens) / seconds_since(start);
  for (size_t i = 0; i < changed.size(); ++i) copy({.from = before[i], .to = changed[i]}, m.stream);
  if (m.compute) copy({.from = m.weights, .to = m.compute}, m.stream);
  gpu::synchronize(m.device, m.stream);
  return rate;
}

TrainResult Trainer::run(const TrainHooks& hooks) {
  Impl& m = *impl_;
  const TrainOptions& o = m.config.train;
  TrainResult result;
  Prefetch batches = m.batches_ahead();
  const double tokens_per_step = double(o.batch_tokens * o.accumulation);
  double rate = 0, flops_rate = 0;  // smoothed
  const double promised = promised_flops(m.device);
  const int64_t whole_memory = m.device.kind == Device::cpu ? 0 : gpu::device_info(m.device.index).memory_bytes;
  int64_t saved_at = m.resumed ? m.step : -1;
  result.status = {.step = m.step, .steps = m.expected_steps(), .progress = m.progress(), .seconds = m.trained_seconds};
  while (!m.done()) {
    if (m.anyone(hooks.should_stop && hooks.should_stop())) {
      result.end = TrainEnd::stopped;
      break;
    }
    const double before = m.trained_seconds;
    TrainStatus s = m.train_step(batches);
    s.step_seconds = std::max(1e-9, m.trained_seconds - before);
    const auto smooth = [](double old, double now) { return old == 0 ? now : 0.9 * old + 0.1 * now; };
    rate = smooth(rate, tokens_per_step / s.step_seconds);
    flops_rate = smooth(flops_rate, m.step_flops / s.step_seconds);
    s.tokens_per_second = rate;
    s.flops_per_second = flops_rate;
    if (promised > 0) s.utilisation = flops_rate / promised;
    // Asking takes time, and the answer hardly changes.
    const bool asked = s.step % o.log_every == 0 || m.done() || result.status.memory_bytes == 0;
    s.memory_bytes = asked ? used_memory(m.device, whole_memory) : result.status.memory_bytes;
    s.seconds_left =
        m.by_time() ? std::max(0.0, m.budget() - s.seconds) : double(s.steps - s.step) * tokens_per_step / rate;
    if (s.step % o.log_every == 0 || m.done()) m.log_step(s);
    result.status = s;
    if (hooks.on_step) hooks.on_step(s);
    if (o.eval_every > 0 && s.step % o.eval_every == 0 && !m.done()) {
      const Score x = m.score_on_held_out();
      m.log_score(x);
      if (hooks.on_score) hooks.on_score(s, x);
      if (m.is_best_of_all(x) && m.save()) saved_at = s.step, m.note_best(x);
    }
    const bool due = o.checkpoint_every > 0 && s.step % o.checkpoint_every == 0 && !m.done() && saved_at != s.step;
    if (due && m.save()) saved_at = s.step;
  }
  m.forget_model();
  if (saved_at != m.step && !(m.step == 0 && result.end == TrainEnd::stopped) && m.save()) saved_at = m.step;
  if (result.end == TrainEnd::finished) {
    result.score = m.score_on_held_out();
    m.log_score(result.score);
    if (saved_at == m.step && m.is_best(result.score)) m.note_best(result.score);
  }
  if (saved_at == m.step) result.checkpoint = m.last_checkpoint;
  m.compare_weights();
  result.failed_saves = m.failed_saves;
  result.parameter_hash = parameter_hash(m.layout, HostCopy(result_weights(), m.stream).tensor());
  m.log.write({{"event", result.end == TrainEnd::finished ? "end" : "stopped"},
               {"step", m.step},
               {"seconds", m.trained_seconds},
               {"parameter_hash", result.parameter_hash}});
  return result;
}

}  // namespace ingot
