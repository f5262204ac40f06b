#include "ingot/engines/train/trainer.h"

#include <algorithm>
#include <cmath>

#include "ingot/core/clock.h"
#include "ingot/core/log.h"
#include "ingot/core/memory/memory.h"
#include "ingot/data/prefetch.h"
#include "ingot/engines/train/optimizer/shards.h"
#include "ingot/engines/train/run/run_log.h"
#include "ingot/engines/train/run/run_progress.h"
#include "ingot/engines/train/run/run_ranks.h"
#include "ingot/engines/train/run/train_checkpoint.h"
#include "ingot/engines/train/run/train_state.h"
#include "ingot/engines/train/step_passes.h"
#include "ingot/gpu/allocator.h"
#include "ingot/gpu/device.h"
#include "ingot/gpu/promised.h"
#include "ingot/kernels/adamw/adamw.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/kernels/copy/host_copy.h"
#include "ingot/models/gpt/trained.h"

namespace ingot {
namespace {

constexpr int64_t kCompareEvery = 100;  // steps between comparisons of the ranks' weights

// Operations of bf16 products per second according to the data sheet, without sparsity. 0 where the rate is not known,
// as for every CPU.
double promised_flops(Device device) {
  if (device.kind == Device::cpu) return 0;
  return gpu::promised_bf16_flops(gpu::device_info(device.index).name);
}

// The speed of steps, smoothed over a run, and the memory in use.
class StepMeter {
 public:
  explicit StepMeter(Device device)
      : device_(device),
        promised_flops_(promised_flops(device)),
        gpu_memory_(device.kind == Device::cpu ? 0 : gpu::device_info(device.index).memory_bytes) {}
  // Adds speed and memory to the status of a step of so many tokens and operations. The memory is the last known one
  // without `ask_for_memory`, because asking takes time and the answer hardly changes.
  void measure(TrainStatus& s, double tokens, double flops, bool ask_for_memory) {
    s.tokens_per_second = tokens_rate_ = smooth(tokens_rate_, tokens / s.step_seconds);
    s.flops_per_second = flops_rate_ = smooth(flops_rate_, flops / s.step_seconds);
    if (promised_flops_ > 0) s.utilisation = flops_rate_ / promised_flops_;
    if (ask_for_memory || used_memory_ == 0)
      used_memory_ =
          device_.kind == Device::cpu ? resident_memory() : gpu_memory_ - gpu::memory_of(device_).available();
    s.memory_bytes = used_memory_;
  }

 private:
  static double smooth(double old, double now) { return old == 0 ? now : 0.9 * old + 0.1 * now; }
  const Device device_;
  const double promised_flops_;
  const int64_t gpu_memory_;
  int64_t used_memory_ = 0;
  double tokens_rate_ = 0, flops_rate_ = 0;  // per second
};

}  // namespace

struct Trainer::Impl {
  RunConfig config;
  RunData data;
  std::string command;
  RunRanks ranks;
  RunDirectory directory;
  TrainState state;
  StepPasses passes;
  RunProgress at;
  std::shared_ptr<const Packer> packer;
  RunLog log;
  int failed_saves = 0, bad_steps = 0;
  std::string last_checkpoint;
  bool resumed = false;
  int64_t saved_step = -1;  // the step of the newest checkpoint
  std::string init_hash;    // the hash of the initial parameters if these come from an earlier run

  Impl(const RunConfig& c, RunData d, const std::string& dir, const std::string& cmd, const ResumeFrom& from,
       Device where, Communicator* others)
      : config(c),
        data(std::move(d)),
        command(cmd),
        ranks(others),
        directory(others == nullptr || others->rank() == 0 ? dir : "", config, data),
        state(config, where, ranks),
        passes(state),
        at{.config = config} {
    check(config.train);
    ranks.meet(config, data, where);
    if (config.train.order == "windows" && config.train.batch_tokens % config.model.context != 0)
      fail(ErrorCode::usage, "train.batch_tokens: found ", config.train.batch_tokens,
           ", expected a multiple of model.context, ", config.model.context, ", as train.order is windows");
    require_memory(state.memory.capacity() + state.optimizer.bytes(),
                   detail::concat("training ", state.layout.count(), " parameters"), gpu::memory_of(where));
    passes.plan();
    check_held_out();
    packer = std::make_shared<Packer>(data.train, PackOptions{.order = batch_order(config.train.order),
                                                              .tokens = config.train.batch_tokens,
                                                              .max_segment = config.model.context,
                                                              .seed = config.train.seed});
    state.initialise_weights();
    const std::optional<Checkpoint> found = directory ? directory.find(from) : std::nullopt;
    if (!found && !config.train.init_from.empty() && ranks.rank() == 0) take_weights_of(config.train.init_from);
    state.optimizer.start_average(state.weights);
    if (directory) enter_directory(found);
    if (ranks) share_state();
    if (resumed) saved_step = at.step;
    state.renew_compute();
  }

  // --- where a run begins ---
  // Checks before the first step, so that no error appears only at the first score: too few tokens, and ids outside the
  // vocabulary.
  void check_held_out() const {
    const EvaluationBatches batches(data.held_out, {.tokens = config.train.batch_tokens});
    std::vector<int32_t> ids;
    for (int64_t at = 0, size = data.held_out->size(); at < size; at += int64_t(ids.size())) {
      ids.resize(size_t(std::min(size - at, int64_t(1) << 20)));
      data.held_out->read(at, ids);
    }
  }
  void take_weights_of(const std::string& path) {
    const TrainedModel other = load_trained(path);
    if (other.tokenizer->hash() != data.tokenizer->hash())
      fail(ErrorCode::usage, "train.init_from: ", path, ": found a model of another tokenizer, expected this run's; ",
           other.tokenizer_file, " is the model's");
    state.take_weights(other, path);
    at.looped = other.looping;
    init_hash = other.parameter_hash;
    log_info("starting with the weights of ", other.checkpoint);
  }
  void enter_directory(const std::optional<Checkpoint>& found) {
    directory.write_new();
    if (found) {
      resume_from(*found, state, at, data);
      last_checkpoint = found->path();
      resumed = true;
      if (!at.by_time() && config.train.steps < at.step)
        fail(ErrorCode::usage, directory.name(), ": found ", at.step,
             " steps done, expected a run of at least as many, not ", config.train.steps);
      log_info("resuming at step ", at.step, " from ", found->path());
      set_aside_after(directory.name(), at.step);
    }
    directory.write_config();
    log.open(directory.path("log.jsonl"));
    OrderedJson line = start_event(state, at, data, ranks);
    line["command"] = command;
    if (!init_hash.empty()) line["init_parameter_hash"] = init_hash;
    log.write(line);
  }
  // Rank 0 has read a checkpoint or an earlier run; all ranks receive its state.
  void share_state() {
    struct Word {
      int64_t step;
      double trained_seconds;
      int64_t looped, resumed;
    };
    ranks.communicator()->barrier(kLoadSeconds);
    const Word word = ranks.as_rank_0(Word{at.step, at.trained_seconds, at.looped, resumed});
    at.step = word.step, at.trained_seconds = word.trained_seconds, at.looped = word.looped != 0;
    resumed = word.resumed != 0;
    state.share(ranks);
  }
  // --- checkpoints ---
  // A failed save is reported and never stops training.
  bool save() {
    if (!ranks) return write_checkpoint();
    state.optimizer.gather_state();
    ranks.wait(state.stream);
    compare_weights();
    const bool saved = write_checkpoint();
    ranks.communicator()->barrier(kLoadSeconds);
    return ranks.as_rank_0(saved);
  }
  bool save_step() {
    const bool saved = save();
    if (saved) saved_step = at.step;
    return saved;
  }
  bool write_checkpoint() {
    if (!directory) return true;
    const auto begun = Clock::now();
    try {
      const HostState here(state);
      if (!all_finite(here.weights.tensor())) {
        log_warn("not saving step ", at.step, ": the weights are not finite");
        return false;
      }
      const CheckpointContent content = checkpoint_content(state, here, at, data);
      last_checkpoint = directory.save(at.step, content);
      const double seconds = seconds_since(begun);
      if (const std::string note = note_of_slow_save(at.step, content, seconds); !note.empty()) log_info(note);
      log.write({{"event", "checkpoint"}, {"step", at.step}, {"path", last_checkpoint}, {"saving_seconds", seconds}});
      return true;
    } catch (const Error& e) {
      ++failed_saves;
      log_warn(e.what(), at.done() ? "" : "; training goes on");
      log.write({{"event", "checkpoint_failed"}, {"step", at.step}, {"error", e.what()}});
      return false;
    }
  }
  void compare_weights() const {
    if (!ranks) return;
    ranks.check_same(hash_of_bits(HostCopy(state.weights, state.stream).tensor()), [&](int64_t r) {
      fail(ErrorCode::numeric, "rank ", r, ": found weights that are not rank 0's after step ", at.step,
           ", expected the same bits on every rank. The last checkpoint is ",
           last_checkpoint.empty() ? "rank 0's" : last_checkpoint);
    });
  }

  // --- a step ---
  // The batches of this rank's passes, from the next step on.
  Prefetch batches_ahead() const {
    const int64_t here = state.passes, all = config.train.accumulation, first = ranks.rank() * here;
    return Prefetch(
        [p = packer, here, all, first](int64_t i, Batch& into) { p->fill(i / here * all + first + i % here, into); },
        at.step * here);
  }
  // On a GPU, Muon's iterations have operands of 16 bits, as its authors' do.
  Products optimizer_products() const { return state.compute ? Products::bf16 : products_named(config.train.products); }
  // The number of scored targets in the next step, over the passes of all ranks.
  int64_t step_targets() const {
    int64_t sum = 0;
    for (int64_t pass = 0; pass < config.train.accumulation; ++pass)
      sum += packer->targets(at.step * config.train.accumulation + pass);
    return sum;
  }
  // The mean loss over `targets` targets. The passes of all ranks are added in their order.
  double mean_loss(int64_t targets) const {
    const HostCopy mine(state.pass_losses, state.stream);
    std::vector<double> all(size_t(config.train.accumulation));
    if (ranks)
      ranks.communicator()->gather_bytes(mine.tensor().data, mine.tensor().bytes(), all.data());
    else
      std::copy_n(mine.tensor().ptr<double>(), all.size(), all.data());
    double sum = 0;
    for (const double x : all) sum += x;
    return targets > 0 ? sum / double(targets) : 0;
  }
  TrainStatus train_step(Prefetch& batches) {
    const auto start = Clock::now();
    TrainStatus s;
    const double p = at.progress();
    s.looping = at.looping();
    s.lr_factor = learning_rate_factor(config.train.schedule, p, at.step, at.expected_steps());
    const int64_t targets = step_targets();
    passes.run(batches, s.looping, targets);
    OptimizerStep step{.step = at.step + 1,
                       .lr_factor = s.lr_factor,
                       .momentum = muon_momentum(config.train.schedule, p),
                       .products = optimizer_products()};
    if (state.optimizer.average()) step.ema = ema_decay(config.train.schedule, double(at.expected_steps()));
    state.optimizer.step(state.all_weights(), state.step_grads(), step);
    ranks.wait(state.stream);
    s.loss = mean_loss(targets);  // the step's only wait
    s.grad_norm = read_number(state.optimizer.gradient_norm(), state.stream);
    note_bad_step(s);
    ++at.step;
    s.step_seconds = std::max(1e-9, seconds_since(start));
    note_time();
    if (at.step % kCompareEvery == 0) compare_weights();
    s.step = at.step;
    s.steps = at.expected_steps();
    s.progress = at.progress();
    s.seconds = at.trained_seconds;
    return s;
  }
  void note_bad_step(const TrainStatus& s) {
    if (std::isfinite(s.grad_norm)) {
      bad_steps = 0;
      return;
    }
    const std::string where = std::isfinite(s.loss) ? "the gradient of " + state.broken_tensor(ranks) : "the loss";
    if (ranks.rank() == 0)
      log_warn("step ", at.step, ": the gradient's norm is ", s.grad_norm, ", found first in ", where,
               "; the step is skipped");
    if (++bad_steps >= config.train.max_bad_steps)
      fail(ErrorCode::numeric, "training stopped at step ", at.step, ": found ", bad_steps,
           " steps in a row whose gradient is not finite, the last time in ", where,
           "; expected finite numbers. The last checkpoint is ", last_checkpoint.empty() ? "none" : last_checkpoint);
  }
  // --- the clock of a run by time: scores and saves count; train.reserve_seconds are for the last score and save
  Clock::time_point clock_begun;
  double seconds_before = 0;  // seconds of the run before this process
  void begin_clock() { clock_begun = Clock::now(), seconds_before = at.trained_seconds; }
  void note_time() { at.trained_seconds = ranks.as_rank_0(seconds_before + seconds_since(clock_begun)); }

  // A failed score is reported and does not stop training. With several ranks only an infinite or NaN score, visible to
  // all ranks, is treated this way.
  std::optional<Score> score_or_warn(std::optional<Error>* failure = nullptr) {
    try {
      return score_on_held_out();
    } catch (const LostRank&) { throw; } catch (const Error& e) {
      if (ranks && e.code != ErrorCode::numeric) throw;
      if (ranks.rank() == 0) log_warn("step ", at.step, " has no score: ", e.what());
      log.write({{"event", "score_failed"}, {"step", at.step}, {"error", e.what()}});
      if (failure != nullptr) failure->emplace(e);
      return std::nullopt;
    }
  }
  // Scores the step, and saves the step if its score is the best so far.
  void score_and_keep_best(const TrainStatus& s, const TrainHooks& hooks) {
    if (const std::optional<Score> x = score_or_warn()) {
      log.write(score_event(at, *x));
      if (hooks.on_score) hooks.on_score(s, *x);
      if (ranks.as_rank_0(directory.is_best(*x)) && save_step()) directory.note_best(s.step, *x);
    }
    note_time();
  }
  // Whether the step just done is one of every n, and not the last, which finish() scores and saves.
  bool due(int64_t every) const { return every > 0 && at.step % every == 0 && !at.done(); }
  // The end of a run: the last checkpoint and, unless the run was stopped, the last score.
  void finish(TrainResult& result) {
    const bool nothing_done = at.step == 0 && result.end == TrainEnd::stopped;
    if (saved_step != at.step && !nothing_done) save_step();
    if (result.end == TrainEnd::finished) {
      if (const std::optional<Score> x = score_or_warn(&result.score_failure)) {
        result.score = *x;
        log.write(score_event(at, *x));
        if (saved_step == at.step && directory.is_best(*x)) directory.note_best(at.step, *x);
      }
    }
    if (saved_step == at.step) result.checkpoint = last_checkpoint;
    compare_weights();
    result.failed_saves = failed_saves;
    result.parameter_hash = parameter_hash(state.layout, HostCopy(state.result_weights(), state.stream).tensor());
    log.write({{"event", result.end == TrainEnd::finished ? "end" : "stopped"},
               {"step", at.step},
               {"seconds", at.trained_seconds},
               {"parameter_hash", result.parameter_hash}});
  }
  Score score_on_held_out() const {
    const Products products = products_named(config.train.products);
    // The average has no separate copy in the products' type: the average borrows the weights' copy, which is renewed
    // afterwards.
    const Tensor result = state.result_weights();
    const bool other = state.compute && result.data != state.weights.data;
    if (other) copy({.from = result, .to = state.compute}, state.stream);
    const Score s = score(config.model, {result, state.compute}, *data.tokenizer, data.held_out,
                          {.batch_tokens = config.train.batch_tokens,
                           .looping = at.looping(),
                           .products = products,
                           .stream = state.stream,
                           .ranks = ranks.communicator()});
    if (other) state.renew_compute();
    return s;
  }
};

Trainer::Trainer(const RunConfig& config, RunData data, const std::string& directory, const std::string& command,
                 const ResumeFrom& from, Device device, Communicator* ranks)
    : impl_(std::make_unique<Impl>(config, std::move(data), directory, command, from, device, ranks)) {}
Trainer::~Trainer() = default;
int64_t Trainer::step() const { return impl_->at.step; }
const RunConfig& Trainer::config() const { return impl_->config; }
const RunData& Trainer::data() const { return impl_->data; }
bool Trainer::looping() const { return impl_->at.looping(); }
Device Trainer::device() const { return impl_->state.device; }
int64_t Trainer::replayed_passes() const { return impl_->passes.replays(); }
Tensor Trainer::weights() const { return impl_->state.weights; }
Tensor Trainer::result_weights() const { return impl_->state.result_weights(); }
int64_t Trainer::parameter_count() const { return impl_->state.layout.count(); }

void Trainer::set_steps(int64_t steps) {
  INGOT_CHECK_EQ(impl_->at.step, int64_t(0), "trainer: steps can be set before the first step only");
  impl_->config.train.steps = steps;
  if (impl_->directory) impl_->directory.write_config();
}

double Trainer::measure_tokens_per_second(double seconds) {
  Impl& m = *impl_;
  // Whole steps are run, optimizer included, and all changed tensors are restored.
  std::vector<Tensor> changed{m.state.weights};  // the copy in the products' type is renewed from the weights
  for (const NamedState& s : m.state.optimizer.state()) changed.push_back(s.tensor);
  int64_t bytes = 0;
  for (const Tensor& t : changed) bytes += Arena::aligned(t.bytes());
  Arena kept(bytes, gpu::memory_of(m.state.device));
  std::vector<Tensor> before;
  for (const Tensor& t : changed) {
    before.push_back(kept.take(t.dtype, t.shape));
    copy({.from = t, .to = before.back()}, m.state.stream);
  }
  Prefetch batches = m.batches_ahead();
  const auto whole_step = [&] {
    m.passes.run(batches, m.at.looping(), m.step_targets());
    m.state.optimizer.step(m.state.all_weights(), m.state.step_grads(),
                           {.step = m.at.step + 1, .products = m.optimizer_products()});
    gpu::synchronize(m.state.device, m.state.stream);
  };
  whole_step();  // the first step touches memory for the first time
  int64_t tokens = 0;
  const auto start = Clock::now();
  do {
    whole_step();
    tokens += m.config.train.batch_tokens * m.config.train.accumulation;
  } while (seconds_since(start) < seconds);
  const double rate = double(tokens) / seconds_since(start);
  for (size_t i = 0; i < changed.size(); ++i) copy({.from = before[i], .to = changed[i]}, m.state.stream);
  m.state.renew_compute();
  gpu::synchronize(m.state.device, m.state.stream);
  return rate;
}

TrainResult Trainer::run(const TrainHooks& hooks) {
  Impl& m = *impl_;
  const TrainOptions& o = m.config.train;
  TrainResult result;
  Prefetch batches = m.batches_ahead();
  StepMeter meter(m.state.device);
  const double tokens_per_step = double(o.batch_tokens * o.accumulation);
  m.begin_clock();
  result.status = {
      .step = m.at.step, .steps = m.at.expected_steps(), .progress = m.at.progress(), .seconds = m.at.trained_seconds};
  while (!m.at.done()) {
    if (m.ranks.anyone(hooks.should_stop && hooks.should_stop())) {
      result.end = TrainEnd::stopped;
      break;
    }
    TrainStatus s = m.train_step(batches);
    const bool logged = s.step % o.log_every == 0 || m.at.done();
    meter.measure(s, tokens_per_step, m.passes.flops(), logged);
    s.seconds_left = m.at.by_time() ? std::max(0.0, m.at.budget() - s.seconds)
                                    : double(s.steps - s.step) * tokens_per_step / s.tokens_per_second;
    if (logged) m.log.write(step_event(s));
    result.status = s;
    if (hooks.on_step) hooks.on_step(s);
    if (m.due(o.eval_every)) m.score_and_keep_best(s, hooks);
    if (m.due(o.checkpoint_every) && m.saved_step != m.at.step) {
      m.save_step();
      m.note_time();
    }
  }
  m.passes.forget_model();
  m.finish(result);
  return result;
}

}  // namespace ingot
