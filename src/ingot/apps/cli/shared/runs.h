#pragma once
// What train, eval, generate and demo share.
#include <functional>
#include <string>

#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/framework/interrupt.h"
#include "ingot/engines/generate/generator.h"
#include "ingot/engines/train/trainer.h"
#include "ingot/io/json.h"
#include "ingot/models/gpt/config/place.h"

namespace ingot::cli {

// The preset, and over it what file, environment and flags gave for the sections "model" and "train".
RunConfig resolve_config(const std::string& preset, const std::string& model, const std::string& train);

// The sections "model" and "train" of a command's configuration.
void add_sections(Command& c, std::string& model, std::string& train);

// --device auto|cpu|cuda, and what it comes to for a model that is trained or scored; says which GPU it is, and whether
// cuBLASLt is missing there.
void add_device(Command& c, std::string& device);
void add_device(Command& c, DeviceChoice& device);
Device training_device(const GptConfig& config, const std::string& device);
Device training_device(const GptConfig& config, DeviceChoice device);

// How the run chose what to hold out, and the precision of its products.
SplitOptions split_options(const TrainOptions& o);
Products products_of(const TrainOptions& o);

// The documents of a path; says what was left out of it.
std::vector<Document> documents_of(const std::string& path);
void tell_left_out(const std::vector<std::string>& left_out);
// Throws where `out` would be one of the texts below the directory `data`: for results that nothing tells from a text.
void refuse_among_texts(const std::string& out, const std::string& data);
// Throws where `data` is standard input, which can be read once: for commands that read it several times.
void refuse_standard_input(const std::string& data, const std::string& reader);

// Throws where the weights of a finished run could not be saved.
void check_saved(const TrainResult& result, const std::string& directory);
// Throws where a finished run could not be scored.
void check_scored(const TrainResult& result, const std::string& directory);
// A warning where the bytes of a score's targets are not the text's, as after a normalisation.
void warn_of_other_bytes(const Score& score, const RunData& data);
void warn_of_other_bytes(int64_t found, int64_t expected);

// "step 120/2000  loss 4.312  74.1 ms  1.33M tok/s  34.1% MFU  14.2 GB  ETA 1m 05s"; in place of the share of what the
// device promises, where that is not known, "85.3 GFLOP/s".
std::string status_line(const TrainStatus& s);
// What a dashboard shows of a step, and of a score.
std::vector<std::pair<std::string, double>> numbers_of(const TrainStatus& s);
std::vector<std::pair<std::string, double>> numbers_of(const Score& s);
// "loss 1.2345, 1.1870 bits per byte over 123,456 tokens (456,789 bytes)"
std::string score_line(const Score& s);
OrderedJson perplexity_json(double loss);  // null where no double holds it

// Prints what a model writes as it is drawn, never half a character.
struct Continuation {
  std::string prompt;
  std::string from = "prompt";  // what errors call it
  GenerateOptions options;
  std::function<void(std::string_view)> show;  // may be left out
  std::function<bool()> stop;                  // may be left out
  bool repeat_prompt = false;                  // show it first, once the tokenizer has taken it
};
struct Continued {
  std::string text;
  Answer answer;
};
Continued continue_text(Generator& generator, const Tokenizer& tokenizer, const Continuation& c);

}  // namespace ingot::cli
