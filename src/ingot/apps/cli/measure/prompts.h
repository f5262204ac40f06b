#pragma once
// How long a prompt of GPT-OSS takes on a GPU until its first answer is there, with synthetic weights of the published
// shapes: what `ingot bench prompt` prints.
#include <string>
#include <vector>

#include "ingot/kernels/quant/quant.h"
#include "ingot/models/gpt_oss/config.h"
#include "ingot/models/options.h"

namespace ingot {

struct PromptMeasurement {
  std::string size = "120b";
  WeightFormat dense = WeightFormat::bf16;  // qkv, o and head; experts are mxfp4
  std::vector<int64_t> lengths = {100, 1024, 4096};
  int64_t rounds = 5;     // each length so often, in turn
  bool steps = false;     // once in steps of the decode kernels, too
  std::vector<int> gpus;  // more than 1: over each of these numbers, after one where it has room for the model
  Split split = Split::tensor;
};
// From the call that tells the prompt to the host's knowing the token that follows it.
struct PromptTimes {
  int gpus = 1;
  int64_t tokens = 0;
  double p50_ms = 0, best_ms = 0, steps_ms = 0;
  double one_ms = 0;  // over several GPUs: p50 on one, where it has room
  // Of all products; of weights, each chunk's of the experts that chance would choose. Of the busiest GPU.
  double flops = 0, bytes = 0;
};
struct PromptMeasured {
  std::vector<PromptTimes> times;  // by number of GPUs, and of each by length
  int64_t weight_bytes = 0, chunk = 0;
};
// Error{unsupported} without a GPU that runs the kernels, or with too little memory, before any is taken.
PromptMeasured measure_prompts(const PromptMeasurement& m);

}  // namespace ingot
