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
#include "ingot/engines/train/checkpoint.h"
#include "ingot/io/json.h"
#include "ingot/io/sha256.h"
#include "ingot/kernels/adamw/adamw.h"

namespace ingot {
namespace {

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); }

Products products_of(const TrainOptions& o) { return o.products == "bf16" ? Products::bf16 : Products::fp32; }

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

// Tensors of a flat tensor under their parameters' names.
std::vector<NamedTensor> by_name(const ParameterLayout& layout, const Tensor& flat, const std::string& prefix = "") {
  std::vector<NamedTensor> all;
  for (const Parameter& p : layout.all()) all.push_back({prefix + p.name, layout.view(flat, p)});
  return all;
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

std::string parameter_hash(const ParameterLayout& layout, const Tensor& flat) {
  Sha256 hash;
  for (const Parameter& p : layout.all()) {
    const Tensor t = layout.view(flat, p);
    hash.update({static_cast<const char*>(t.data), size_t(t.bytes())});
  }
  return hash.hex();
}

struct Trainer::Impl {
  RunConfig config;
  RunData data;
  std::string directory, command;
  Lock lock;
  ParameterLayout layout;
  Arena memory;
  Tensor weights, grads;
  Optimizer optimizer;
  std::unique_ptr<Gpt> model;
  std::shared_ptr<const Packer> packer;
  RunLog log;
  int64_t step = 0;
  double trained_seconds = 0;
  int failed_saves = 0, bad_steps = 0;
  std::string last_checkpoint;
  std::vector<float> loss, dloss;
  bool looped = false;    // the recurrence is on for good: it was when the weights were saved
  std::string init_hash;  // of the parameters that training began with, where they are another run's

  Impl(const RunConfig& c, RunData d, const std::string& dir, const std::string& cmd, const ResumeFrom& from)
      : config(c),
        data(std::move(d)),
        directory(dir),
        command(cmd),
        layout(c.model),
        memory(2 * (layout.padded_count() * 4 + 64)),
        weights(memory.take(DType::f32, {layout.padded_count()})),
        grads(memory.take(DType::f32, {layout.padded_count()})),
        optimizer(layout, DType::f32, c.train.optimizer, c.train.schedule.ema_horizon > 0) {
    check(config.train);
    if (config.train.order == "windows" && config.train.batch_tokens % config.model.context != 0)
      fail(ErrorCode::usage, "train.batch_tokens: found ", config.train.batch_tokens,
           ", expected a multiple of model.context, ", config.model.context, ", as train.order is windows");
    require_memory(memory.capacity() + optimizer.bytes(), detail::concat("training ", layout.count(), " parameters"));
    loss.resize(size_t(config.train.batch_tokens));
    dloss.assign(loss.size(), float(1.0 / double(config.train.batch_tokens * config.train.accumulation)));
    packer = std::make_shared<Packer>(data.train, PackOptions{.order = batch_order(config.train.order),
                                                              .tokens = config.train.batch_tokens,
                                                              .max_segment = config.model.context,
                                                              .seed = config.train.seed});
    initialise(config.model, layout, weights, config.train.seed);
    const std::optional<Checkpoint> found = directory.empty() ? std::nullopt : find_run(from);
    if (!found && !config.train.init_from.empty()) take_weights_of(config.train.init_from);
    optimizer.start_average(weights);
    if (!directory.empty()) enter_directory(found);
  }

  // --- from another run ---
  void take_weights_of(const std::string& path) {
    const TrainedModel other = load_trained(path);
    const auto refuse = [&](const auto&... what) { fail(ErrorCode::usage, "train.init_from: ", path, ": ", what...); };
    if (other.tokenizer->hash() != data.tokenizer->hash())
      refuse("found a model of another tokenizer, expected this run's; ", other.tokenizer_file, " is the model's");
    const ParameterLayout theirs(other.config.model);
    if (theirs.all().size() != layout.all().size())
      refuse("found a model of ", theirs.all().size(), " tensors, expected ", layout.all().size(),
             " as this configuration has");
    for (size_t i = 0; i < layout.all().size(); ++i) {
      const Parameter &a = theirs.all()[i], &b = layout.all()[i];
      const Tensor from = theirs.view(other.weights, a), to = layout.view(weights, b);
      if (a.name != b.name || from.shape != to.shape)
        refuse("found the tensor ", a.name, " of ", from.shape, ", expected ", b.name, " of ", to.shape,
               " as this configuration has");
      std::copy_n(static_cast<const float*>(from.data), from.numel(), static_cast<float*>(to.data));
    }
    looped = other.looping;
    init_hash = other.parameter_hash;
    log_info("starting with the weights of ", other.checkpoint);
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
                              "keep_checkpoints", "keep_best"})
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

  CheckpointContent content() {
    CheckpointContent c;
    const Tensor average = optimizer.average();
    c.model = by_name(layout, average ? average : weights);
    if (average)
      for (NamedTensor& t : by_name(layout, weights, "weights.")) c.optimizer.push_back(std::move(t));
    for (const NamedState& s : optimizer.state())
      if (s.name != "ema.weights") c.optimizer.push_back({s.name, s.tensor});
    OrderedJson state;
    state["step"] = step;
    state["trained_seconds"] = trained_seconds;
    state["looping"] = looping();
    state["data_fingerprint"] = data.train->fingerprint();
    state["tokenizer_hash"] = data.tokenizer->hash();
    state["parameter_hash"] = parameter_hash(layout, average ? average : weights);
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
    CheckpointContent c = content();
    found.load_model(c.model);
    found.load_optimizer(c.optimizer);
    last_checkpoint = found.path();
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
  // A failed save is reported and never stops training.
  bool save() {
    if (directory.empty()) return true;
    if (!all_finite(weights, {})) {
      log_warn("not saving step ", step, ": the weights are not finite");
      return false;
    }
    try {
      last_checkpoint = save_checkpoint(directory, step, content(), int(config.train.keep_checkpoints));
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
  Gpt& bound_model(bool loop) {
    if (!model || model->options().looping != loop) {
      model.reset();  // its memory first
      model = std::make_unique<Gpt>(config.model, DType::f32,
                                    GptOptions{.capacity = config.train.batch_tokens,
                                               .looping = loop,
                                               .training = true,
                                               .products = products_of(config.train)});
    }
    return *model;
  }
  double forward_backward(Prefetch& batches, bool loop) {
    Gpt& gpt = bound_model(loop);
    fill_zero(grads);
    double sum = 0;
    Batch batch;
    for (int64_t a = 0; a < config.train.accumulation; ++a) {
      batches.next(batch);
      const int64_t T = batch.size();
      gpt.losses_and_gradients(weights, as_tensors(batch), Tensor(dloss.data(), {T}), Tensor(loss.data(), {T}), grads);
      for (int64_t t = 0; t < T; ++t) sum += loss[size_t(t)];
    }
    return sum / double(config.train.batch_tokens * config.train.accumulation);
  }
  TrainStatus train_step(Prefetch& batches) {
    const auto start = Clock::now();
    TrainStatus s;
    const double p = progress();
    s.looping = looping();
    s.lr_factor = learning_rate_factor(config.train.schedule, p, step, expected_steps());
    s.loss = forward_backward(batches, s.looping);
    OptimizerStep at{.step = step + 1,
                     .lr_factor = s.lr_factor,
                     .momentum = muon_momentum(config.train.schedule, p),
                     .products = products_of(config.train)};
    if (optimizer.average()) at.ema = ema_decay(config.train.schedule, double(expected_steps()));
    s.grad_norm = optimizer.step(weights, grads, at);
    note_bad_step(s);
    ++step;
    trained_seconds += seconds_since(start);
    s.step = step;
    s.steps = expected_steps();
    s.progress = progress();
    s.seconds = trained_seconds;
    return s;
  }
  void note_bad_step(const TrainStatus& s) {
    if (std::isfinite(s.grad_norm)) {
      bad_steps = 0;
      return;
    }
    log_warn("step ", step, ": the gradient's norm is ", s.grad_norm, "; the step is skipped");
    if (++bad_steps >= config.train.max_bad_steps)
      fail(ErrorCode::numeric, "training stopped at step ", step, ": found ", bad_steps,
           " steps in a row whose gradient is not finite; expected finite numbers. The last checkpoint is ",
           last_checkpoint.empty() ? "none" : last_checkpoint);
  }

  Score score_on_held_out() const {
    const Tensor average = optimizer.average();
    const Products products = products_of(config.train);
    return score(config.model, average ? average : weights, *data.tokenizer, data.held_out,
                 {.batch_tokens = config.train.batch_tokens, .looping = looping(), .products = products});
  }
  void log_step(const TrainStatus& s) {
    log.write({{"event", "step"},
               {"step", s.step},
               {"loss", finite_or_null(s.loss)},
               {"grad_norm", finite_or_null(s.grad_norm)},
               {"lr_factor", s.lr_factor},
               {"looping", s.looping},
               {"tokens_per_second", s.tokens_per_second},
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
                 const ResumeFrom& from)
    : impl_(std::make_unique<Impl>(config, std::move(data), directory, command, from)) {}
Trainer::~Trainer() = default;
int64_t Trainer::step() const { return impl_->step; }
const RunConfig& Trainer::config() const { return impl_->config; }
const RunData& Trainer::data() const { return impl_->data; }
bool Trainer::looping() const { return impl_->looping(); }
Tensor Trainer::weights() const { return impl_->weights; }
Tensor Trainer::result_weights() const {
  const Tensor average = impl_->optimizer.average();
  return average ? average : impl_->weights;
}
int64_t Trainer::parameter_count() const { return impl_->layout.count(); }

void Trainer::set_steps(int64_t steps) {
  INGOT_CHECK_EQ(impl_->step, int64_t(0), "trainer: steps can be set before the first step only");
  impl_->config.train.steps = steps;
  if (!impl_->directory.empty()) write_file(impl_->path("config.json"), to_json(impl_->config) + "\n");
}

double Trainer::measure_tokens_per_second(double seconds) {
  Impl& m = *impl_;
  // Whole steps, optimizer included; everything they change is put back.
  std::vector<Tensor> changed{m.weights};
  for (const NamedState& s : m.optimizer.state()) changed.push_back(s.tensor);
  std::vector<std::vector<uint8_t>> before;
  for (const Tensor& t : changed)
    before.emplace_back(static_cast<uint8_t*>(t.data), static_cast<uint8_t*>(t.data) + t.bytes());
  Prefetch batches(m.packer, m.step * m.config.train.accumulation);
  const auto whole_step = [&] {
    m.forward_backward(batches, m.looping());
    m.optimizer.step(m.weights, m.grads, {.step = m.step + 1, .products = products_of(m.config.train)});
  };
  whole_step();  // the first touches memory
  int64_t tokens = 0;
  const auto start = Clock::now();
  do {
    whole_step();
    tokens += m.config.train.batch_tokens * m.config.train.accumulation;
  } while (seconds_since(start) < seconds);
  const double rate = double(tokens) / seconds_since(start);
  for (size_t i = 0; i < changed.size(); ++i)
    std::copy(before[i].begin(), before[i].end(), static_cast<uint8_t*>(changed[i].data));
  return rate;
}

TrainResult Trainer::run(const TrainHooks& hooks) {
  Impl& m = *impl_;
  const TrainOptions& o = m.config.train;
  TrainResult result;
  Prefetch batches(m.packer, m.step * o.accumulation);
  const double tokens_per_step = double(o.batch_tokens * o.accumulation);
  double rate = 0;  // smoothed
  int64_t saved_at = m.last_checkpoint.empty() ? -1 : m.step;
  result.status = {.step = m.step, .steps = m.expected_steps(), .progress = m.progress(), .seconds = m.trained_seconds};
  while (!m.done()) {
    if (hooks.should_stop && hooks.should_stop()) {
      result.end = TrainEnd::stopped;
      break;
    }
    const double before = m.trained_seconds;
    TrainStatus s = m.train_step(batches);
    const double now = tokens_per_step / std::max(1e-9, m.trained_seconds - before);
    rate = rate == 0 ? now : 0.9 * rate + 0.1 * now;
    s.tokens_per_second = rate;
    s.seconds_left =
        m.by_time() ? std::max(0.0, m.budget() - s.seconds) : double(s.steps - s.step) * tokens_per_step / rate;
    if (s.step % o.log_every == 0 || m.done()) m.log_step(s);
    result.status = s;
    if (hooks.on_step) hooks.on_step(s);
    if (o.eval_every > 0 && s.step % o.eval_every == 0 && !m.done()) {
      const Score x = m.score_on_held_out();
      m.log_score(x);
      if (hooks.on_score) hooks.on_score(s, x);
      if (m.is_best(x) && m.save()) saved_at = s.step, m.note_best(x);
    }
    const bool due = o.checkpoint_every > 0 && s.step % o.checkpoint_every == 0 && !m.done() && saved_at != s.step;
    if (due && m.save()) saved_at = s.step;
  }
  m.model.reset();
  if (saved_at != m.step && !(m.step == 0 && result.end == TrainEnd::stopped) && m.save()) saved_at = m.step;
  if (result.end == TrainEnd::finished) {
    result.score = m.score_on_held_out();
    m.log_score(result.score);
    if (saved_at == m.step && m.is_best(result.score)) m.note_best(result.score);
  }
  if (saved_at == m.step) result.checkpoint = m.last_checkpoint;
  result.failed_saves = m.failed_saves;
  result.parameter_hash = parameter_hash(m.layout, result_weights());
  m.log.write({{"event", result.end == TrainEnd::finished ? "end" : "stopped"},
               {"step", m.step},
               {"seconds", m.trained_seconds},
               {"parameter_hash", result.parameter_hash}});
  return result;
}

TrainedModel load_trained(const std::string& directory) {
  TrainedModel t;
  const Checkpoint found = open_checkpoint(directory);
  const std::string run = found.run_directory();
  const std::string config_file = join_path(run, "config.json");
  t.config = run_config_from_json(read_file(config_file), config_file);
  const std::string json = join_path(run, "tokenizer.json");
  const std::string model = join_path(run, "tokenizer.model"),
                    tokenizer_file = exists(model) && !exists(json) ? model : json;
  t.tokenizer = load_tokenizer(tokenizer_file);
  t.tokenizer_file = tokenizer_file;
  const std::string where = found.path() + "/state.json";
  const Json state = parse_json(found.state_json(), where);
  Fields fields(state, where);
  uint32_t hash = 0;
  fields.require("step", t.step);
  fields.require("looping", t.looping);
  fields.require("tokenizer_hash", hash);
  if (hash != t.tokenizer->hash() || t.tokenizer->vocab_size() != t.config.model.vocab)
    fail(ErrorCode::bad_data, tokenizer_file, ": found a tokenizer of ", t.tokenizer->vocab_size(),
         " tokens with hash ", t.tokenizer->hash(), ", expected the model's, ", t.config.model.vocab,
         " tokens with hash ", hash);
  const ParameterLayout layout(t.config.model);
  t.memory = Arena(layout.padded_count() * 4);
  t.weights = t.memory.take(DType::f32, {layout.padded_count()});
  std::vector<NamedTensor> tensors = by_name(layout, t.weights);
  found.load_model(tensors);
  t.checkpoint = found.path();
  t.parameter_hash = parameter_hash(layout, t.weights);
  return t;
}

}  // namespace ingot
