#pragma once
// Functions shared by train, eval, generate and demo.
#include <functional>
#include <string>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/framework/interrupt.h"
#include "ingot/engines/generate/generator.h"
#include "ingot/engines/train/trainer.h"
#include "ingot/io/json.h"
#include "ingot/models/gpt/config/place.h"

namespace ingot::cli {

// The preset's configuration, changed by the values of file, environment and flags for the sections "model" and
// "train".
RunConfig resolve_config(const std::string& preset, const std::string& model, const std::string& train);

// The configuration `base`, changed by the given values (JSON texts with the sections "model" and "train"). Throws
// where a loop_extra has no layers to repeat.
RunConfig changed_config(const std::string& base, const std::string& given);

// Throws if the tokenizer of a run does not exist. `file` is the value of --tokenizer; if it is empty, the tokenizer is
// train.tokenizer: bpe, char or a file.
void require_tokenizer(const TrainOptions& train, const std::string& file = "");

// The sections "model" and "train" of a command's configuration.
void add_sections(Command& c, std::string& model, std::string& train);

// The option --device auto|cpu|cuda, and the device that it means for a model that is trained or scored. The log names
// the GPU, and says if cuBLASLt is missing.
void add_device(Command& c, std::string& device);
void add_device(Command& c, DeviceChoice& device);
Device training_device(const GptConfig& config, const std::string& device);
Device training_device(const GptConfig& config, DeviceChoice device);

// The options with which the run split its data.
SplitOptions split_options(const TrainOptions& o);

// The documents of a path. The log names the files that are left out.
std::vector<Document> documents_of(const std::string& path);
void log_left_out(const std::vector<std::string>& left_out);
// Throws if `out` is below the directory `data`, for results that a later run would read as texts.
void refuse_among_texts(const std::string& out, const std::string& data);
// Throws if `data` is standard input, which can be read only once, for commands that read the data several times.
void refuse_standard_input(const std::string& data, const std::string& reader);

// Throws if the weights of a finished run could not be saved.
void check_saved(const TrainResult& result, const std::string& directory);
// Throws if a finished run could not be scored.
void check_scored(const TrainResult& result, const std::string& directory);
// Warns if the number of bytes of a score's targets differs from the text's, for example after a normalisation.
void warn_of_other_bytes(const Score& score, const RunData& data);
void warn_of_other_bytes(int64_t found, int64_t expected);

// "step 120/2000  loss 4.312  74.1 ms  1.33M tok/s  34.1% MFU  14.2 GB  ETA 1m 05s"; with "85.3 GFLOP/s" instead of MFU
// if the device's rate is not known.
std::string status_line(const TrainStatus& s);
// The numbers of a step and of a score for a dashboard.
std::vector<std::pair<std::string, double>> numbers_of(const TrainStatus& s);
std::vector<std::pair<std::string, double>> numbers_of(const Score& s);
// "loss 1.2345, 1.1870 bits per byte over 123,456 tokens (456,789 bytes)"
std::string score_line(const Score& s);
// `eval` prints this line when the first SIGINT or SIGTERM arrives while it scores.
constexpr const char* kScoreStops = "eval: stopping after the current batch; a second signal stops at once";
// Throws the error of a score that a signal stopped. `so_far`: the sums over the tokens scored so far, with 0 bytes
// where their bytes are unknown. `all`: the number of tokens to score.
[[noreturn]] void fail_stopped(const DocumentScore& so_far, int64_t all);
OrderedJson perplexity_json(double loss);  // null if the value is no finite double

// Generates text and shows it while it is sampled, in complete characters.
struct Continuation {
  std::string prompt;
  std::string from = "prompt";  // the name of the prompt in errors
  GenerateOptions options;
  std::function<void(std::string_view)> show;  // may be left out
  std::function<bool()> stop;                  // may be left out
  bool repeat_prompt = false;                  // show the prompt first, after the tokenizer has accepted it
  std::vector<std::string> stops;              // the text ends before the first of these strings
};
struct Continued {
  std::string text;
  std::string stop;  // the stop string that ended the text, or empty
  Answer answer;
};
Continued continue_text(Generator& generator, const Tokenizer& tokenizer, const Continuation& c);

}  // namespace ingot::cli
