// ingot train: one run, or one per seed.
#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/shared/models.h"
#include "ingot/apps/cli/shared/ranks.h"
#include "ingot/apps/cli/shared/runs.h"
#include "ingot/core/comm/socket_communicator.h"
#include "ingot/core/log.h"
#include "ingot/core/progress.h"
#include "ingot/gpu/device.h"
#include "ingot/gpu/nccl.h"
#include "ingot/io/checkpoint.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"
#include "ingot/io/tensorboard.h"

namespace ingot::cli {
namespace {

// The other processes of a run, and the GPU of this one.
struct OtherRanks {
  OtherRanks(const RankPlace& where, double deadline) : place(where), sockets(where, deadline) {}
  RankPlace place;
  SocketCommunicator sockets;
  std::optional<gpu::DeviceGuard> gpu;
  std::unique_ptr<gpu::NcclCommunicator> nccl;

  // Of ranks whose model is on this device.
  Communicator& on(Device device) {
    if (device.kind == Device::cpu) return sockets;
    if (!nccl) {
      gpu.emplace(device.index);
      nccl = std::make_unique<gpu::NcclCommunicator>(sockets, device.index);
      if (sockets.rank() == 0) log_info(sockets.world(), " ranks talk by NCCL ", gpu::nccl_version());
    }
    return *nccl;
  }
};

struct TrainCommand {
  std::string preset, data, out, tokenizer, seeds, model, train, resume = "newest", from, device = "auto", tensorboard;
  int64_t ranks = 1, gpus = 0;
  double rank_timeout = 120;
  std::shared_ptr<OtherRanks> others;  // where this process is one of several
  // "a" of runs/a, and of one of several seeds "a/seed-1".
  std::string name_of(const std::string& directory) const {
    const std::string name = base_name(directory);
    return seeds.empty() ? name : join_path(base_name(parent_path(directory)), name);
  }
  bool is_first() const { return others == nullptr || others->sockets.rank() == 0; }
};

// The configuration, and where the weights and the tokenizer come from: a preset or another run, and over it what was
// given.
struct Start {
  RunConfig config;
  std::string tokenizer;
};
Start start_of(const TrainCommand& o) {
  const Json given = parse_json(o.train, "configuration");
  const auto init = given.find("init_from");
  if (init == given.end() || !init->is_string() || init->get<std::string>().empty())
    return {resolve_config(o.preset.empty() ? "demo" : o.preset, o.model, o.train), o.tokenizer};
  if (!o.preset.empty())
    fail(ErrorCode::usage, "found --preset and --init-from, expected one of them: the run has a configuration");
  require_no_gpt_oss(init->get<std::string>());
  const TrainedModel other = load_trained(init->get<std::string>());
  const std::string over = "{\"model\": " + o.model + ", \"train\": " + o.train + "}";
  return {run_config_from_json(merge_json(other.run_config, over, "configuration"), "configuration"),
          o.tokenizer.empty() ? other.tokenizer_file : o.tokenizer};
}

// A run goes on from what it did last: the second time the words must not send it back again.
std::string command_to_resume() { return command_line_without("--from"); }

// Where nobody chose how many passes a step has: as many as the run has had so far, else one a rank. Rank 0 has the
// run's directory.
void deal_passes(const TrainCommand& o, const std::string& directory, RunConfig& config) {
  const Json given = parse_json(o.train, "configuration");
  if (config.train.accumulation != 1 || given.contains("accumulation")) return;
  const int ranks = o.others ? o.others->sockets.world() : 1;
  const std::string before = join_path(directory, "config.json");
  int64_t passes = ranks;
  if (o.is_first() && exists(before)) passes = run_config_from_json(read_file(before), before).train.accumulation;
  if (o.others) o.others->sockets.broadcast_bytes(&passes, sizeof passes, 0);
  config.train.accumulation = passes;
  if (o.is_first() && passes > 1)
    log_info(ranks == 1 ? "" : std::to_string(ranks) + " ranks: ", passes, " passes of ",
             with_commas(config.train.batch_tokens), " tokens a step");
}

Trainer open_run(const TrainCommand& o, const RunConfig& config, RunData data, const std::string& directory) {
  const Device device = device_of_rank(config.model, device_named(o.device), o.others ? &o.others->place : nullptr);
  try {
    return Trainer(config, std::move(data), directory, command_line(),
                   {.last_good = o.resume == "last-good", .name = o.from}, device,
                   o.others ? &o.others->on(device) : nullptr);
  } catch (const DamagedCheckpoint& e) {
    fail(e.code, e.what(), ": --resume last-good takes it, --from step-N any other");
  }
}

// A full disk under a dashboard must not stop training: the first failure is said, and the rest stays silent.
class Dashboard {
 public:
  Dashboard(const std::string& directory, int64_t step) {
    if (!directory.empty()) board_ = TensorBoard(directory, step);
  }
  template <class What> void show(int64_t step, const What& what) {
    if (!board_) return;
    try {
      board_.write(step, numbers_of(what));
    } catch (const Error& e) {
      log_warn("TensorBoard's file is incomplete from here on: ", e.what());
      board_ = TensorBoard();
    }
  }

 private:
  TensorBoard board_;
};

// What a run writes first would replace somebody's vocabulary or log. A run that was ended early has left its lock.
void refuse_files_of_others(const TrainCommand& o, const std::string& directory) {
  const auto there = [&](const char* name) { return exists(join_path(directory, name)); };
  if (there("config.json") || there(".lock")) return;
  for (const char* name : {"tokenizer.json", "tokenizer.model", "log.jsonl"}) {
    if (!there(name)) continue;
    const bool its_own =
        !o.tokenizer.empty() && exists(o.tokenizer) && read_file(o.tokenizer) == read_file(join_path(directory, name));
    if (!its_own)
      fail(ErrorCode::usage, directory, ": found ", name,
           " in a directory that is no run, expected a run, or a directory without such a file");
  }
}

TrainResult run_one(const TrainCommand& o, const Start& start, const std::string& directory) {
  if (o.is_first()) refuse_files_of_others(o, directory);
  RunConfig resolved = start.config;
  deal_passes(o, directory, resolved);
  RunData data = load_run_data(o.data, resolved, start.tokenizer);
  Trainer trainer = open_run(o, resolved, std::move(data), directory);
  if (o.is_first())
    log_info(directory, ": ", with_commas(trainer.parameter_count()), " parameters, ",
             with_commas(trainer.data().train->size()), " training tokens, ",
             with_commas(trainer.data().held_out->size()), " held out, vocabulary ",
             trainer.data().tokenizer->vocab_size());
  const int64_t first = trainer.step();

  Interrupt interrupt;
  Progress progress;
  Dashboard dashboard(o.is_first() && !o.tensorboard.empty() ? join_path(o.tensorboard, o.name_of(directory)) : "",
                      first);
  TrainHooks hooks;
  if (o.is_first()) {
    hooks.on_step = [&](const TrainStatus& s) {
      progress.update(status_line(s));
      if (s.step % resolved.train.log_every == 0 || s.step == s.steps) dashboard.show(s.step, s);
    };
    hooks.on_score = [&](const TrainStatus& s, const Score& score) {
      dashboard.show(s.step, score);
      progress.finish("step " + std::to_string(s.step) + "  held out: " + score_line(score));
    };
  }
  hooks.should_stop = [&] { return interrupt.asked() || asked_to_stop(); };
  tell_training();
  const TrainResult result = trainer.run(hooks);
  if (!o.is_first()) {  // the first one says all of it
    if (result.end == TrainEnd::stopped) fail(ErrorCode::interrupted, "stopped at step ", result.status.step);
    return result;
  }
  if (result.status.step > first) progress.finish(status_line(result.status));
  if (result.end == TrainEnd::stopped) {
    if (result.checkpoint.empty() && result.status.step > 0)
      fail(ErrorCode::interrupted, directory, ": stopped at step ", result.status.step, ", and saving failed");
    if (result.checkpoint.empty()) fail(ErrorCode::interrupted, directory, ": stopped before the first step");
    fail(ErrorCode::interrupted, "stopped at step ", result.status.step, " of ", result.status.steps, ", saved in ",
         result.checkpoint, "; to resume: ", command_to_resume());
  }
  dashboard.show(result.status.step, result.score);
  log_info("held out: ", score_line(result.score));
  check_saved(result, directory);
  log_info("saved ", result.checkpoint, " (parameters ", result.parameter_hash.substr(0, 16), ")");
  if (const auto best = best_checkpoint(directory); best && best->step != result.status.step)
    log_info("best: ", join_path(directory, "best"), ", step ", best->step, ", held-out loss ", fixed(best->loss, 4));
  return result;
}

std::vector<int64_t> seeds_of(const std::string& list) {
  std::vector<int64_t> seeds;
  std::istringstream words(list);
  for (std::string word; std::getline(words, word, ',');) {
    if (word.empty() || word.size() > 15 || word.find_first_not_of("0123456789") != std::string::npos)
      fail(ErrorCode::usage, "--seeds: found '", word, "', expected numbers joined by commas, such as 1,2,3");
    const int64_t seed = std::stoll(word);
    if (std::find(seeds.begin(), seeds.end(), seed) != seeds.end())
      fail(ErrorCode::usage, "--seeds: found ", seed, " twice, expected each seed once");
    seeds.push_back(seed);
  }
  return seeds;
}

// "1.2345 +- 0.0123": mean and sample deviation.
std::string mean_and_deviation(const std::vector<double>& v) {
  double mean = 0, squares = 0;
  for (double x : v) mean += x / double(v.size());
  for (double x : v) squares += (x - mean) * (x - mean);
  return fixed(mean, 4) + " +- " + fixed(v.size() > 1 ? std::sqrt(squares / double(v.size() - 1)) : 0, 4);
}

// What a run whose rank was lost can go on from.
std::string advice_of(const TrainCommand& o) {
  if (!o.seeds.empty()) return "the same command goes on";
  try {
    const std::optional<Checkpoint> last = latest_checkpoint(o.out);
    return last ? "the last checkpoint is " + last->path() + ", from which the same command goes on"
                : "there is no checkpoint yet";
  } catch (const Error&) { return ""; }
}

void train_runs(const TrainCommand& o) {
  if (!o.from.empty() && (o.resume != "newest" || !o.seeds.empty()))
    fail(ErrorCode::usage, "found --from with ", o.seeds.empty() ? "--resume last-good" : "--seeds",
         ", expected one of them");
  const Start start = start_of(o);
  if (o.seeds.empty()) {
    run_one(o, start, o.out);
    if (!o.is_first()) return;
    log_info("try: ", program_name(), " generate ", o.out, " --prompt \"...\"   or   ", program_name(), " plot ",
             o.out);
    return;
  }
  std::vector<double> losses, bits;
  for (int64_t seed : seeds_of(o.seeds)) {
    Start seeded = start;
    seeded.config.train.seed = uint64_t(seed);
    const TrainResult result = run_one(o, seeded, join_path(o.out, "seed-" + std::to_string(seed)));
    losses.push_back(result.score.loss);
    bits.push_back(result.score.bits_per_byte);
  }
  if (!o.is_first()) return;
  log_info(losses.size(), " seeds: held-out loss ", mean_and_deviation(losses), ", bits per byte ",
           mean_and_deviation(bits));
}

// One of several processes: of `ingot train --ranks`, or of torchrun and its like.
void train_as_rank(TrainCommand o, RankPlace place) {
  place.listener = inherited_listener();
  try {
    o.others = std::make_shared<OtherRanks>(place, o.rank_timeout);
    train_runs(o);
  } catch (const LostRank& e) {
    hand_over(e, true);
    const std::string advice = place.rank == 0 ? advice_of(o) : "";
    fail(e.code, e.what(), advice.empty() ? "" : "; ", advice);
  } catch (const Error& e) {
    hand_over(e, false);
    throw;
  }
}

void train(TrainCommand o) {
  if (o.gpus > 0) {
    if (o.ranks > 1 && o.ranks != o.gpus)
      fail(ErrorCode::usage, "found --gpus ", o.gpus, " and --ranks ", o.ranks, ", expected one of them");
    o.ranks = o.gpus;
    o.device = "cuda";
  }
  const RankPlace place = rank_place_from_environment();
  if (place.world > 1 && o.ranks > 1 && o.ranks != place.world)
    fail(ErrorCode::usage, "found ", o.gpus > 0 ? "--gpus " : "--ranks ", o.ranks, " and WORLD_SIZE=", place.world,
         ", expected one of them, or the same");
  if (place.world > 1) return train_as_rank(std::move(o), place);
  if (o.ranks > 1) return start_ranks(int(o.ranks), [&] { return advice_of(o); });
  train_runs(o);
}

}  // namespace

void add_train(Command& root) {
  Command& c = root.add("train", "Trains a small GPT on text or token shards; resumes a run that was interrupted");
  auto o = std::make_shared<TrainCommand>();
  c.text("--preset NAME", o->preset,
         "what to start from: demo, nano, nano-golf, nano-golf-loop, golf-small, golf (default: demo)");
  c.text("--data PATH", o->data, "a text file, a directory of text files, or shards").require();
  c.text("--out DIR", o->out, "the run's directory: configuration, tokenizer, log, checkpoints").require();
  c.setting(
      "--init-from RUN", "train.init_from", Kind::text,
      "fine-tune: begin with the weights, tokenizer and configuration of a run or a checkpoint, in place of a preset");
  c.choice("--resume WHICH", o->resume, {"newest", "last-good"},
           "where a run goes on: its newest checkpoint, or the newest that is whole (default: newest)");
  c.text("--from STEP", o->from, "go back to this checkpoint of the run, such as step-00001000, and on from there");
  c.text("--tokenizer FILE", o->tokenizer, "a tokenizer (default: what the preset says, usually learnt from the data)");
  add_device(c, o->device);
  c.setting("--steps N", "train.steps", Kind::integer, "length of the run in optimizer steps")
      .replaces("train.seconds");
  c.setting("--seconds X", "train.seconds", Kind::number, "length of the run in wall-clock time, instead of steps")
      .more_than(0);
  c.setting("--seed N", "train.seed", Kind::integer, "of initialisation and order of data (default: 1)");
  c.text("--seeds LIST", o->seeds, "several runs, DIR/seed-N each, and their mean and deviation: 1,2,3");
  c.setting("--batch-tokens N", "train.batch_tokens", Kind::integer, "tokens of one forward and backward pass");
  c.setting("--accumulation N", "train.accumulation", Kind::integer,
            "passes per optimizer step, over all ranks (default: the preset's, or one a rank)");
  c.integer("--ranks N", o->ranks, 1, 256, "train in N processes that share each step's passes (default: 1)");
  c.integer("--gpus N", o->gpus, 1, 256, "the same on N GPUs of this machine");
  c.number("--rank-timeout X", o->rank_timeout, 0.1, 86400,
           "seconds without an answer after which a rank is given up, and the run ends (default: 120)");
  c.setting("--context N", "model.context", Kind::integer, "longest segment the model sees");
  c.setting("--products TYPE", "train.products", Kind::text, "matrix products in fp32 or bf16");
  c.setting("--eval-every N", "train.eval_every", Kind::integer,
            "score held-out text every N steps (0: at the end only)");
  c.setting("--checkpoint-every N", "train.checkpoint_every", Kind::integer, "save every N steps (0: at the end only)");
  c.text("--tensorboard DIR", o->tensorboard, "also write what TensorBoard shows, to DIR/<the run's name>");
  add_sections(c, o->model, o->train);
  c.examples(R"(  ingot train --preset nano --data input.txt --out runs/a --seed 1 --steps 2000
  ingot train --data corpus/ --out runs/b --seconds 600 --set model.layers=8 --set train.optimizer.matrix_lr=0.02
  ingot train --config experiment.json --data corpus/ --out runs/c --seeds 1,2,3
  ingot train --data more.txt --out runs/tuned --init-from runs/a/best --steps 500
Ctrl-C saves and stops; the same command goes on from there, with a larger --steps also a finished run. A configuration file holds {"model": {...}, "train": {...}},
or keys alone: {"preset": "nano", "layers": 8, "steps": 5000, "matrix_lr": 0.01}; the config.json of a run shows every key.)");
  c.run([o] { train(*o); });
}

}  // namespace ingot::cli
