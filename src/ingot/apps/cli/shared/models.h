#pragma once
// A model named on the command line, whatever its kind: a run of `ingot train`, or a GPT-OSS checkpoint.
#include <string>
#include <vector>

#include "ingot/models/registry.h"

namespace ingot::cli {

class Command;

// --layers, --quant and --device.
void add_options(Command& c, DecoderOptions& o);
void add_quant(Command& c, bool& e4m3_experts);
void add_gpus(Command& c, int64_t& gpus, Split& split);
// The same of a command that tries several numbers of GPUs, one after the other: a list like "2,4". The numbers
// above 1.
void add_gpu_counts(Command& c, std::string& list, Split& split);
std::vector<int> gpu_counts(const std::string& list);
// Throws where --split was given and nothing is shared.
void refuse_split_of_one(const Command& c, int64_t gpus);
// add_gpus(), and --whole-head.
void add_gpu_options(Command& c, DecoderOptions& o);
// `tokens`: the longest sequence that will be needed. Says how long it took where that is noticeable.
OpenedModel open_model(const std::string& path, int64_t tokens, const DecoderOptions& o);
// Whether a path holds a model of a kind that chats.
bool chats(const std::string& path);
// For commands that serve no other model.
void require_chat(const std::string& path);
// The context to open a model with: `asked`, or where that is 0 `usual`, or the model's if that is less.
int64_t context_of(const std::string& path, int64_t asked, int64_t usual);
// For commands that serve no other model.
void require_gpt_oss(const std::string& path);
// For commands that adapt, quantise or train further.
void require_no_gpt_oss(const std::string& path);
// RUN or --model: exactly one of them.
std::string chosen_model(const std::string& run, const std::string& model);

// --synthetic and --dense: random weights of GPT-OSS in the place of a model's path.
struct SyntheticOptions {
  std::string size, dense = "bf16";
};
void add_synthetic(Command& c, SyntheticOptions& o);
// The name of the random model (models/gpt_oss/synthetic.h), or chosen_model() where --synthetic was not given.
// Throws where --dense was given without --synthetic.
std::string chosen_model(const Command& c, const std::string& run, const std::string& model, const SyntheticOptions& o);

// A file of one JSON list of ids a line; "-" is standard input.
std::vector<std::vector<int32_t>> read_ids(const std::string& path);
// Before the first list is used, so that a bad last one costs nothing.
void check_ids(const std::vector<std::vector<int32_t>>& lists, int64_t vocab, const std::string& path);

}  // namespace ingot::cli
