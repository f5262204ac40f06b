// ingot train: trains one model, or one for each seed.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
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
#include "ingot/models/gpt/config/presets.h"

namespace ingot::cli {
namespace {

// The connection to the other processes of a run, and the GPU of this process.
struct OtherRanks {
  OtherRanks(const RankPlace& where, double deadline) : place(where), sockets(where, deadline) {}
  RankPlace place;
  SocketCommunicator sockets;
  std::optional<gpu::DeviceGuard> gpu;
  std::unique_ptr<gpu::NcclCommunicator> nccl;

  // The communicator of ranks whose models are on this device.
  Communicator& on(Device device) {
    if (device.kind == Device::cpu) return sockets;
    if (!nccl) {
      gpu.emplace(device.index);
      nccl = std::make_unique<gpu::NcclCommunicator>(sockets, device.index);
      if (sockets.rank() == 0) log_info(sockets.world(), " ranks communicate by NCCL ", gpu::nccl_version());
    }
    return *nccl;
  }
};

struct TrainCommand {
  std::string preset, data, out, tokenizer, seeds, model, train, resume = "newest", from, device = "auto", tensorboard;
  int64_t ranks = 1, gpus = 0;
  double rank_timeout = 120;
  std::shared_ptr<OtherRanks> others;  // only if this process is one of several
  // The name of a run: "a" for runs/a, "a/seed-1" for one of several seeds.
  std::string name_of(const std::string& directory) const {
    const std::string name = base_name(directory);
    return seeds.empty() ? name : join_path(base_name(parent_path(directory)), name);
  }
  bool is_first() const { return others == nullptr || others->sockets.rank() == 0; }
};

// The configuration and the tokenizer's file: those of a preset or of another run, changed by the given options.
struct Start {
  RunConfig config;
  std::string tokenizer;
};

// The tokenizer's file in a run's directory, or "".
std::string tokenizer_of_run(const std::string& directory) {
  for (const char* name : {"tokenizer.json", "tokenizer.model"})
    if (exists(join_path(directory, name))) return join_path(directory, name);
  return "";
}

// The given keys of `train` over an earlier run: a given number of steps replaces the run's length in seconds.
std::string over_earlier_run(const std::string& train) {
  Json given = parse_json(train, "configuration");
  if (given.contains("steps") && !given.contains("seconds")) given["seconds"] = 0;
  return write_json(given);
}

// The directory of a fine-tuned run contains the run's configuration and tokenizer, and from the first checkpoint on
// also weights. The initial model is then not read again, and its files may have moved.
Start fine_tuning_start(const TrainCommand& o, const std::string& init_from, const std::string& directory) {
  if (!o.preset.empty())
    fail(ErrorCode::usage, "found --preset and --init-from, expected one of them: the run has a configuration");
  const std::string over = "{\"model\": " + o.model + ", \"train\": " + over_earlier_run(o.train) + "}";
  const std::string before = join_path(directory, "config.json");
  if (exists(before))
    return {changed_config(read_file(before), over), o.tokenizer.empty() ? tokenizer_of_run(directory) : o.tokenizer};
  require_no_gpt_oss(init_from);
  const TrainedModel other = load_trained(init_from);
  return {changed_config(other.run_config, over), o.tokenizer.empty() ? other.tokenizer_file : o.tokenizer};
}

Start start_of(const TrainCommand& o, const std::string& directory) {
  const Json given = parse_json(o.train, "configuration");
  const auto init = given.find("init_from");
  const bool fine_tuned = init != given.end() && init->is_string() && !init->get<std::string>().empty();
  Start start = fine_tuned ? fine_tuning_start(o, init->get<std::string>(), directory)
                           : Start{resolve_config(o.preset.empty() ? "demo" : o.preset, o.model, o.train), o.tokenizer};
  // The tokenizer's file may have moved as well.
  std::string& named = start.config.train.tokenizer;
  const std::string& file = !start.tokenizer.empty() ? start.tokenizer : named;
  if (exists(join_path(directory, "config.json")) && file != "bpe" && file != "char" && !exists(file))
    if (const std::string own = tokenizer_of_run(directory); !own.empty()) {
      if (o.is_first()) log_info(file, " no longer exists: continuing with ", own);
      start.tokenizer = own;
    }
  require_tokenizer(start.config.train, start.tokenizer);
  return start;
}

// A run continues from its last checkpoint, so --from must not be repeated, or the run would go back again.
std::string command_to_resume() { return command_line_without("--from"); }

// Chooses the number of passes per step if no option names the number: the number of the run so far, or one pass per
// rank. Only rank 0 has the run's directory.
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

// A full disk must not stop training because of a dashboard: the first failure is reported, and later ones are silent.
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

// The run's directory below the directory of all boards. If another run of the same name has it, this run gets "NAME-2"
// and so on. The file `.run` in a board names its run.
std::string board_of_run(const std::string& boards, const std::string& name, const std::string& run) {
  const std::string whose = std::filesystem::weakly_canonical(run).string();
  for (int64_t n = 1;; ++n) {
    const std::string board = join_path(boards, n == 1 ? name : name + "-" + std::to_string(n));
    const std::string owner = join_path(board, ".run");
    if (exists(owner) && read_file(owner) != whose) continue;
    create_directories(board);
    if (!exists(owner)) write_file(owner, whose);
    if (n > 1) log_info("TensorBoard shows this run as ", base_name(board), ", since another one is called ", name);
    return board;
  }
}

// Refuses a directory that is not a run but contains files that a run would replace, such as a vocabulary or a log. A
// run that ended early is recognised by its lock.
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

// The size of the vocabulary follows from the tokenizer and may differ from the configuration, because a text has few
// different characters, or too few repeated pairs for the requested size.
void log_other_vocabulary(const TrainCommand& o, const RunData& data) {
  const Json model = parse_json(o.model, "configuration");
  const auto asked = model.find("vocab");
  if (asked != model.end() && *asked != data.tokenizer->vocab_size())
    log_warn("model.vocab: found ", asked->dump(), ", which changes nothing here: the vocabulary is that of the ",
             data.tokenizer->kind(), " tokenizer, ", with_commas(data.tokenizer->vocab_size()), " tokens");
}

TrainResult run_one(const TrainCommand& o, std::optional<uint64_t> seed, const std::string& directory) {
  if (o.is_first()) refuse_files_of_others(o, directory);
  const Start start = start_of(o, directory);
  RunConfig resolved = start.config;
  if (seed) resolved.train.seed = *seed;
  deal_passes(o, directory, resolved);
  RunData data = load_run_data(o.data, resolved, start.tokenizer);
  if (o.is_first()) log_other_vocabulary(o, data);
  const bool begun = exists(join_path(directory, "config.json"));
  Trainer trainer = open_run(o, resolved, std::move(data), directory);
  if (o.is_first() && begun && o.resume == "last-good" && trainer.step() == 0)
    log_warn(directory, ": found no undamaged checkpoint; the run begins again at step 1");
  if (o.is_first()) log_left_out(trainer.data().left_out);
  if (o.is_first())
    log_info(directory, ": ", with_commas(trainer.parameter_count()), " parameters, ",
             with_commas(trainer.data().train->size()), " training tokens, ",
             with_commas(trainer.data().held_out->size()), " held out, vocabulary ",
             trainer.data().tokenizer->vocab_size());
  const int64_t first = trainer.step();

  Interrupt interrupt(
      o.is_first() ? "train: stopping and saving after the current step; a second signal stops without saving" : "");
  Progress progress;
  Dashboard dashboard(
      o.is_first() && !o.tensorboard.empty() ? board_of_run(o.tensorboard, o.name_of(directory), directory) : "",
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
  report_training_begun();
  const TrainResult result = trainer.run(hooks);
  if (!o.is_first()) {  // rank 0 reports the result
    check_scored(result, directory);
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
  if (!result.score_failure) {
    dashboard.show(result.status.step, result.score);
    log_info("held out: ", score_line(result.score));
    warn_of_other_bytes(result.score, trainer.data());
  }
  check_saved(result, directory);
  log_info("saved ", result.checkpoint, " (parameters ", result.parameter_hash.substr(0, 16), ")");
  if (const auto best = best_checkpoint(directory); best && best->step != result.status.step)
    log_info("best: ", join_path(directory, "best"), ", step ", best->step, ", held-out loss ", fixed(best->loss, 4));
  check_scored(result, directory);
  return result;
}

std::vector<uint64_t> seeds_of(const std::string& list) {
  std::vector<uint64_t> seeds;
  std::istringstream words(list);
  for (std::string word; std::getline(words, word, ',');) {
    uint64_t seed = 0;
    const char* const end = word.data() + word.size();
    const auto [last, error] = std::from_chars(word.data(), end, seed);
    if (error != std::errc() || last != end)
      fail(ErrorCode::usage, "--seeds: found '", word, "', expected numbers joined by commas, such as 1,2,3");
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

// Advice from which checkpoint a run continues after a rank was lost.
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
  if (o.seeds.empty()) {
    run_one(o, std::nullopt, o.out);
    if (!o.is_first()) return;
    const std::string run = cli::quoted(o.out);
    log_info("try: ", program_name(), " generate ", run, " --prompt \"...\"   or   ", program_name(), " plot ", run);
    return;
  }
  std::vector<double> losses, bits;
  for (uint64_t seed : seeds_of(o.seeds)) {
    const TrainResult result = run_one(o, seed, join_path(o.out, "seed-" + std::to_string(seed)));
    losses.push_back(result.score.loss);
    bits.push_back(result.score.bits_per_byte);
  }
  if (!o.is_first()) return;
  log_info(losses.size(), " seeds: held-out loss ", mean_and_deviation(losses), ", bits per byte ",
           mean_and_deviation(bits));
}

// Trains as one of several processes, started by `ingot train --ranks` or a launcher such as torchrun.
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
  if (place.world > 1 || o.ranks > 1) refuse_standard_input(o.data, "several ranks");
  if (!o.seeds.empty()) refuse_standard_input(o.data, "--seeds");
  if (place.world > 1) return train_as_rank(std::move(o), place);
  if (o.ranks > 1) return start_ranks(int(o.ranks), [&] { return advice_of(o); });
  train_runs(o);
}

}  // namespace

void add_train(Command& root) {
  Command& c = root.add("train", "Trains a small GPT on text or token shards; resumes a run that was interrupted");
  auto o = std::make_shared<TrainCommand>();
  c.choice("--preset NAME", o->preset, preset_names(), "the configuration to start from (default: demo)");
  c.text("--data PATH", o->data,
         "a text file, a directory of text files, JSON lines with a \"text\", or shards; - is standard input")
      .require();
  c.text("--out DIR", o->out, "the run's directory: configuration, tokenizer, log, checkpoints").require();
  c.setting(
      "--init-from RUN", "train.init_from", Kind::text,
      "fine-tune: begin with the weights, tokenizer and configuration of a run or a checkpoint, in place of a preset");
  c.choice("--resume WHICH", o->resume, {"newest", "last-good"},
           "the checkpoint from which a run continues: the newest, or the newest undamaged one (default: newest)");
  c.text("--from STEP", o->from, "go back to this checkpoint of the run, such as step-00001000, and continue from it");
  c.text("--tokenizer FILE", o->tokenizer,
         "a tokenizer (default: the preset's, which is usually learned from the data)");
  add_device(c, o->device);
  c.setting("--steps N", "train.steps", Kind::integer, "length of the run in optimizer steps")
      .replaces("train.seconds");
  c.setting(
       "--seconds X", "train.seconds", Kind::number,
       "length of the run in seconds of wall-clock time, evaluations and checkpoints included, in place of --steps")
      .more_than(0);
  c.setting("--seed N", "train.seed", Kind::unsigned_integer,
            "seed of the initialisation and of the order of the data (default: 1)");
  c.text("--seeds LIST", o->seeds,
         "train one run per seed, in DIR/seed-N, and print mean and deviation; such as 1,2,3");
  c.setting("--batch-tokens N", "train.batch_tokens", Kind::integer, "tokens of one forward and backward pass");
  c.setting("--accumulation N", "train.accumulation", Kind::integer,
            "passes per optimizer step, over all ranks (default: the preset's, or one per rank)");
  c.integer("--ranks N", o->ranks, 1, 256, "train in N processes that share each step's passes (default: 1)");
  c.integer("--gpus N", o->gpus, 1, 256, "train in N processes, each on one of the first N GPUs of this machine");
  c.number("--rank-timeout X", o->rank_timeout, 0.1, 86400,
           "seconds without an answer after which a rank counts as lost and the run ends (default: 120)");
  c.setting("--context N", "model.context", Kind::integer, "longest segment of tokens that the model sees");
  c.setting("--products TYPE", "train.products", Kind::text, "type of matrix products: fp32 or bf16");
  c.setting("--eval-every N", "train.eval_every", Kind::integer,
            "score held-out text every N steps (0: at the end only)");
  c.setting("--checkpoint-every N", "train.checkpoint_every", Kind::integer, "save every N steps (0: at the end only)");
  c.text("--tensorboard DIR", o->tensorboard, "also write event files for TensorBoard to DIR/<the run's name>");
  add_sections(c, o->model, o->train);
  c.examples(R"(  ingot train --preset nano --data input.txt --out runs/a --seed 1 --steps 2000
  ingot train --data corpus/ --out runs/b --seconds 600 --set model.layers=8 --set train.optimizer.matrix_lr=0.02
  ingot train --config experiment.json --data corpus/ --out runs/c --seeds 1,2,3
  ingot train --data more.txt --out runs/tuned --init-from runs/a/best --steps 500
Ctrl-C saves a checkpoint and stops; the same command continues from the checkpoint, with a larger --steps also after the run's end. A configuration file holds {"model": {...}, "train": {...}},
or the keys without their groups: {"preset": "nano", "layers": 8, "steps": 5000, "matrix_lr": 0.01}; the config.json of a run shows every key.)");
  c.run([o, &c] {
    if (o->ranks == 1 && o->gpus <= 1 && rank_place_from_environment().world == 1)
      c.refuse_given({"rank-timeout"}, "a run of one process");
    if (!o->seeds.empty()) c.refuse_given({"seed"}, "--seeds");
    train(*o);
  });
}

}  // namespace ingot::cli
