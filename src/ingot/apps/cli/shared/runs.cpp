#include "ingot/apps/cli/shared/runs.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "ingot/apps/cli/shared/libraries.h"
#include "ingot/core/log.h"
#include "ingot/core/progress.h"
#include "ingot/engines/serve/answer_text.h"
#include "ingot/gpu/cublaslt.h"
#include "ingot/gpu/device.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"
#include "ingot/models/gpt/config/presets.h"
#include "ingot/text/utf8.h"

namespace ingot::cli {
RunConfig resolve_config(const std::string& preset, const std::string& model, const std::string& train) {
  const std::string given = "{\"model\": " + model + ", \"train\": " + train + "}";
  return changed_config(preset_text(preset), given);
}
RunConfig changed_config(const std::string& base, const std::string& given) {
  const RunConfig config = run_config_from_json(merge_json(base, given, "configuration"), "configuration");
  // Checked here and not for every model, because earlier runs with such a value can still be read.
  if (const GptConfig& m = config.model; m.loop_extra > 0 && !m.has_loop())
    fail(ErrorCode::usage, "model.loop_extra: found ", m.loop_extra, " without a loop (loop_first is ", m.loop_first,
         " and loop_last is ", m.loop_last, "), expected 0, or a loop_last of at least loop_first");
  return config;
}

void require_tokenizer(const TrainOptions& train, const std::string& file) {
  const std::string& named = train.tokenizer;
  if (!file.empty() && !exists(file))
    fail(ErrorCode::not_found, "--tokenizer: found '", file,
         "', which is no file, expected the file of a tokenizer; to learn a tokenizer from the data: --set "
         "train.tokenizer=bpe, or --set train.tokenizer=char for a token per character");
  if (file.empty() && named != "bpe" && named != "char" && !exists(named))
    fail(ErrorCode::not_found, "train.tokenizer: found '", named, "', expected bpe, char or the file of a tokenizer");
}

void add_sections(Command& c, std::string& model, std::string& train) {
  const Json known = parse_json(to_json(RunConfig{}), "known keys");
  c.section("model", model, known["model"].dump());
  c.section("train", train, known["train"].dump());
  // The options' names in nanoGPT.
  for (const auto& [theirs, ours] : {std::pair{"n_layer", "layers"},
                                     {"n_head", "heads"},
                                     {"n_embd", "dim"},
                                     {"block_size", "context"},
                                     {"vocab_size", "vocab"},
                                     {"max_iters", "steps"},
                                     {"batch_size", "batch_tokens"},
                                     {"gradient_accumulation_steps", "accumulation"},
                                     {"learning_rate", "matrix_lr"},
                                     {"weight_decay", "matrix_decay"},
                                     {"warmup_iters", "warmup_steps"},
                                     {"grad_clip", "clip"},
                                     {"eval_interval", "eval_every"},
                                     {"log_interval", "log_every"},
                                     {"out_dir", "out"},
                                     {"dataset", "data"},
                                     {"dtype", "products"}})
    c.known_elsewhere(theirs, ours);
}

namespace {
constexpr const char* kDeviceHelp = "device of the model; auto: a GPU if one can run it, else the CPU (default: auto)";
}
void add_device(Command& c, std::string& device) {
  c.choice("--device WHERE", device, {"auto", "cpu", "cuda"}, kDeviceHelp);
}
void add_device(Command& c, DeviceChoice& device) {
  c.choice<DeviceChoice>("--device WHERE", device,
                         {{"auto", DeviceChoice::automatic}, {"cpu", DeviceChoice::cpu}, {"cuda", DeviceChoice::cuda}},
                         kDeviceHelp);
}
Device training_device(const GptConfig& config, const std::string& device) {
  return training_device(config, device_named(device));
}
Device training_device(const GptConfig& config, DeviceChoice device) {
  if (device != DeviceChoice::cpu && gpu::device_count() > 0) use_installed_cublaslt();
  const GptPlace place = place_of_gpt(config, device);
  if (!place.note.empty()) log_info(place.note);
  if (place.device.kind == Device::cpu) return place.device;
  log_info("on ", gpu::device_info(place.device.index).name);
  if (!gpu::lt_available()) log_warn(gpu::lt_version(), "; without, ", kWithoutCublaslt);
  return place.device;
}

SplitOptions split_options(const TrainOptions& o) {
  return {.every = o.held_out_every, .tail = o.held_out_tail, .seed = o.split_seed};
}

std::vector<Document> documents_of(const std::string& path) {
  std::vector<std::string> left_out;
  std::vector<Document> documents = read_documents(path, &left_out);
  log_left_out(left_out);
  return documents;
}
void log_left_out(const std::vector<std::string>& left_out) {
  constexpr size_t kNamed = 5;
  if (left_out.empty()) return;
  std::string names;
  for (size_t i = 0; i < std::min(kNamed, left_out.size()); ++i) names += (i > 0 ? ", " : "") + left_out[i];
  if (left_out.size() > kNamed) names += " and " + std::to_string(left_out.size() - kNamed) + " more";
  log_info("left out of the texts: ", names);
}
void refuse_among_texts(const std::string& out, const std::string& data) {
  if (!is_directory(data)) return;
  namespace fs = std::filesystem;
  std::error_code unreadable;
  const fs::path root = fs::weakly_canonical(data, unreadable);
  for (fs::path above = fs::weakly_canonical(parent_path(out), unreadable);; above = above.parent_path()) {
    if (above == root)
      fail(ErrorCode::usage, out, ": found a name below ", data,
           ", whose files are read as texts, expected another place");
    if (above == above.parent_path()) return;
  }
}
void refuse_standard_input(const std::string& data, const std::string& reader) {
  if (data == kStandardInput)
    fail(ErrorCode::usage, "--data: found standard input with ", reader, ", expected a path: it is read several times");
}

void check_saved(const TrainResult& result, const std::string& directory) {
  if (result.checkpoint.empty())
    fail(ErrorCode::io, directory, ": the model of step ", result.status.step,
         " was not saved, as the warnings above say");
}

void check_scored(const TrainResult& result, const std::string& directory) {
  if (result.score_failure) fail(result.score_failure->code, directory, ": ", result.score_failure->what());
}

void warn_of_other_bytes(int64_t found, int64_t expected) {
  if (found != expected)
    log_warn("the scored tokens stand for ", with_commas(found), " bytes, and the text has ", with_commas(expected),
             ": bits per byte are of the tokens' bytes");
}
void warn_of_other_bytes(const Score& score, const RunData& data) {
  if (data.held_out_bytes > 0)
    warn_of_other_bytes(score.bytes, expected_bytes(data.held_out_bytes, *data.tokenizer, *data.held_out));
}

std::string status_line(const TrainStatus& s) {
  const double ms = 1000 * s.step_seconds;
  std::string line = "step " + std::to_string(s.step) + "/" + std::to_string(s.steps) + "  loss " + fixed(s.loss, 3);
  line += "  " + fixed(ms, ms < 100 ? 1 : 0) + " ms  " + format_count(s.tokens_per_second) + " tok/s";
  if (s.utilisation > 0)
    line += "  " + fixed(100 * s.utilisation, 1) + "% MFU";
  else
    line += "  " + fixed(s.flops_per_second / 1e9, 1) + " GFLOP/s";
  if (s.memory_bytes > 0) line += "  " + format_bytes(double(s.memory_bytes));
  return line + "  ETA " + format_duration(s.seconds_left);
}
std::vector<std::pair<std::string, double>> numbers_of(const TrainStatus& s) {
  std::vector<std::pair<std::string, double>> all{{"train/loss", s.loss},
                                                  {"train/grad_norm", s.grad_norm},
                                                  {"train/lr_factor", s.lr_factor},
                                                  {"speed/tokens_per_second", s.tokens_per_second},
                                                  {"speed/step_seconds", s.step_seconds},
                                                  {"speed/flops_per_second", s.flops_per_second},
                                                  {"memory/bytes", double(s.memory_bytes)}};
  if (s.utilisation > 0) all.emplace_back("speed/utilisation", s.utilisation);
  return all;
}
std::vector<std::pair<std::string, double>> numbers_of(const Score& s) {
  std::vector<std::pair<std::string, double>> all{{"held_out/loss", s.loss}};
  if (s.bytes > 0) all.emplace_back("held_out/bits_per_byte", s.bits_per_byte);
  return all;
}
OrderedJson perplexity_json(double loss) {
  const double perplexity = std::exp(loss);
  return std::isfinite(perplexity) ? OrderedJson(perplexity) : OrderedJson();
}
std::string score_line(const Score& s) {
  std::string line = "loss " + fixed(s.loss, 4);
  if (s.bytes > 0) line += ", " + fixed(s.bits_per_byte, 4) + " bits per byte";
  return line + " over " + with_commas(s.targets) + " tokens (" + with_commas(s.bytes) + " bytes)";
}
void fail_stopped(const DocumentScore& so_far, int64_t all) {
  if (so_far.targets == 0) fail(ErrorCode::interrupted, "stopped by a signal before any token was scored");
  const Score s = mean_score(so_far);
  fail(ErrorCode::interrupted, "stopped by a signal after ", with_commas(s.targets), " of ", with_commas(all),
       " tokens: loss ", fixed(s.loss, 4), s.bytes > 0 ? ", " + fixed(s.bits_per_byte, 4) + " bits per byte" : "");
}

Continued continue_text(Generator& generator, const Tokenizer& tokenizer, const Continuation& c) {
  const std::vector<int32_t> prompt = about(c.from, [&] { return tokenizer.encode(c.prompt); });
  if (c.repeat_prompt && c.show) c.show(c.prompt);
  Continued done;
  Utf8Stream stream;
  StopStrings stops(c.stops);
  const auto show = [&](const std::string& piece) {
    done.text += piece;
    if (c.show && !piece.empty()) c.show(piece);
  };
  done.answer = generator.generate(tokenizer, prompt, c.options, [&](int32_t id) {
    if (id != tokenizer.bos()) show(stops.push(stream.push(tokenizer.token_bytes(id))));
    return !stops.found() && (!c.stop || !c.stop());
  });
  show(stops.push(stream.finish()));
  show(stops.finish());
  if (stops.found()) done.answer.finish = Finish::stop, done.stop = stops.which();
  return done;
}

}  // namespace ingot::cli
