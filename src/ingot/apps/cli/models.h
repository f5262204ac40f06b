#pragma once
// A model named on the command line, whatever its kind: a run of `ingot train`, or a GPT-OSS checkpoint.
#include <optional>

#include "ingot/engines/generate/decoder.h"
#include "ingot/engines/train/trainer.h"

namespace ingot::cli {

struct OpenedModel {
  std::unique_ptr<Decoder> decoder;
  std::vector<int32_t> end_ids;  // ids that end an answer
  double load_seconds = 0;
  // What the decoder reads.
  std::optional<TrainedModel> trained;
  std::unique_ptr<GptOssWeights> weights;
};
// `tokens`: the longest sequence that will be needed, for models whose context is longer than anyone wants memory for.
// `layers`: the first so many, 0 for all; GPT-OSS only.
OpenedModel open_model(const std::string& path, int64_t tokens, int64_t layers);
// For commands that serve no other model.
void require_gpt_oss(const std::string& path);
// RUN or --model: exactly one of them.
std::string chosen_model(const std::string& run, const std::string& model);

// A file of one JSON list of ids a line; "-" is standard input.
std::vector<std::vector<int32_t>> read_ids(const std::string& path);
// Before the first list is used, so that a bad last one costs nothing.
void check_ids(const std::vector<std::vector<int32_t>>& lists, int64_t vocab, const std::string& path);

}  // namespace ingot::cli
