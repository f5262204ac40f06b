#include "ingot/engines/train/trainer.h"

#include <algorithm>

#include "ingot/core/log.h"
#include "ingot/core/memory/memory.h"
#include "ingot/engines/train/run/step_meter.h"
#include "ingot/engines/train/trainer_impl.h"
#include "ingot/gpu/allocator.h"
#include "ingot/gpu/device.h"
#include "ingot/kernels/copy/copy.h"
#include "ingot/models/gpt/trained.h"

namespace ingot {

Trainer::Impl::Impl(const RunConfig& c, RunData d, const std::string& dir, const std::string& cmd,
                    const ResumeFrom& from, Device where, Communicator* others)
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

void Trainer::Impl::check_held_out() const {
  const EvaluationBatches batches(data.held_out, {.tokens = config.train.batch_tokens});
  std::vector<int32_t> ids;
  for (int64_t at = 0, size = data.held_out->size(); at < size; at += int64_t(ids.size())) {
    ids.resize(size_t(std::min(size - at, int64_t(1) << 20)));
    data.held_out->read(at, ids);
  }
}

void Trainer::Impl::take_weights_of(const std::string& path) {
  const TrainedModel other = load_trained(path);
  if (other.tokenizer->hash() != data.tokenizer->hash())
    fail(ErrorCode::usage, "train.init_from: ", path, ": found a model of another tokenizer, expected this run's; ",
         other.tokenizer_file, " is the model's");
  state.take_weights(other, path);
  at.looped = other.looping;
  init_hash = other.parameter_hash;
  log_info("starting with the weights of ", other.checkpoint);
}

void Trainer::Impl::enter_directory(const std::optional<Checkpoint>& found) {
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

void Trainer::Impl::share_state() {
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
  std::vector<Tensor> changed{m.state.weights};  // the copy in the products' type is not saved: it is computed again
                                                 // from the weights
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
