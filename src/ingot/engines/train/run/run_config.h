#pragma once
// A run's configuration: the model and how it is trained. JSON only:
//   {"model": {...GptConfig...}, "train": {..., "schedule": {...}, "optimizer": {...}}}
// Presets, files, environment and command line are merged as JSON first (later wins, key by key) and read here once.
#include <string>
#include <vector>

#include "ingot/engines/train/optimizer/optimizer.h"
#include "ingot/engines/train/schedule.h"
#include "ingot/models/gpt/config/config.h"

namespace ingot {

struct TrainOptions {
  // Length: `steps` steps, or where `seconds` > 0 a time budget for steps, scores and saves, of which `reserve_seconds`
  // are kept for the last save and score.
  int64_t steps = 1000;
  double seconds = 0, reserve_seconds = 1;
  uint64_t seed = 1;
  // `batch_tokens` tokens per forward and backward pass, cut into segments at documents and at the model's context;
  // `accumulation` passes per step.
  int64_t batch_tokens = 4096, accumulation = 1;
  std::string order = "shuffled";  // in which batches take tokens from the documents: a BatchOrder (data/packer.h)
  // char: the text's characters; bpe: trained on the training documents to model.vocab tokens; else a tokenizer's file.
  std::string tokenizer = "bpe";
  // What is held out: one of held_out_every documents, or the end of a single document (SplitOptions).
  uint64_t split_seed = 1;  // not the run's seed: runs of several seeds are scored on the same documents
  int64_t held_out_every = 20;
  double held_out_tail = 0.1;
  std::string products = "fp32";  // type of matrix products: fp32, or bf16 (operands rounded, sums in fp32)
  // A score, checkpoint or line of the log after every so many steps; 0: never (checkpoints: only at the end).
  int64_t eval_every = 0, checkpoint_every = 0, log_every = 10;
  int64_t keep_checkpoints = 2;  // how many of the newest; the checkpoint with the best held-out score is kept too
  bool keep_best = true;         // save whenever held-out text has the best score so far
  std::string init_from;         // a run or a checkpoint whose weights the run begins with; empty: random weights
  int64_t max_bad_steps = 5;     // consecutive steps with infinite or NaN gradients before the run gives up
  // If a GPU has enough memory, activations are kept for the backward pass instead of computed again; the numbers are
  // the same.
  bool keep_activations = true;
  bool cuda_graphs = true;  // passes on a GPU are recorded once and replayed; the numbers are the same
  ScheduleOptions schedule;
  OptimizerOptions optimizer;
};
void check(const TrainOptions& o);

struct RunConfig {
  GptConfig model;
  TrainOptions train;
};
std::string to_json(const RunConfig& c);
RunConfig run_config_from_json(const std::string& text, const std::string& where);

// Merges `over` into `base` (JSON texts): objects key by key, everything else replaced.
std::string merge_json(const std::string& base, const std::string& over, const std::string& where);

}  // namespace ingot
