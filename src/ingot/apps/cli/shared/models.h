#pragma once
// A model named on the command line, whatever its kind: a run of `ingot train`, or a GPT-OSS checkpoint.
#include <string>
#include <vector>

#include "ingot/models/registry.h"

namespace ingot::cli {

class Command;

// How a command wants its model.
struct ModelOptions {
  int64_t layers = 0;     // the first so many, 0 for all; GPT-OSS only
  bool quant = false;     // its experts take e4m3 per 32 numbers
  int64_t slots = 1;      // sequences at a time
  bool together = false;  // that share passes over the weights, on a GPU
  std::string device = "auto";
  int64_t gpus = 1;  // that share a GPT-OSS model
  std::string split = "tensor";
  bool whole_head = false;  // greedy tokens never by a head in 8 bits
  std::string adapters;     // a file of them, for a model of `ingot train`
};
void add_options(Command& c, ModelOptions& o);
void add_quant(Command& c, bool& quant);
void add_gpus(Command& c, int64_t& gpus, std::string& split);
// The same of a command that tries several numbers of GPUs, one after the other: a list like "2,4". The numbers
// above 1.
void add_gpu_counts(Command& c, std::string& list, std::string& split);
std::vector<int> gpu_counts(const std::string& list);
// Throws where --split was given and nothing is shared.
void refuse_split_of_one(const Command& c, int64_t gpus);
// add_gpus(), and --whole-head.
void add_gpu_options(Command& c, ModelOptions& o);
// `tokens`: the longest sequence that will be needed. Says how long it took where that is noticeable.
OpenedModel open_model(const std::string& path, int64_t tokens, const ModelOptions& o);
// For commands that serve no other model.
void require_gpt_oss(const std::string& path);
// For commands that adapt, quantise or train further.
void require_no_gpt_oss(const std::string& path);
// RUN or --model: exactly one of them.
std::string chosen_model(const std::string& run, const std::string& model);

// A file of one JSON list of ids a line; "-" is standard input.
std::vector<std::vector<int32_t>> read_ids(const std::string& path);
// Before the first list is used, so that a bad last one costs nothing.
void check_ids(const std::vector<std::vector<int32_t>>& lists, int64_t vocab, const std::string& path);

}  // namespace ingot::cli
