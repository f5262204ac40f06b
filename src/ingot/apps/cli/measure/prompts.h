#pragma once
// Measures the time from a prompt of GPT-OSS to the first token of its answer on a GPU, with synthetic weights of the
// published shapes. `ingot bench prompt` prints the result.
#include <string>
#include <vector>

#include "ingot/kernels/quant/quant.h"
#include "ingot/models/gpt_oss/config.h"
#include "ingot/models/options.h"

namespace ingot {

struct PromptMeasurement {
  std::string size = "120b";
  WeightFormat dense = WeightFormat::bf16;  // of qkv, output and head; experts are mxfp4
  std::vector<int64_t> lengths = {100, 1024, 4096};
  int64_t rounds = 5;  // number of measurements of each length; the lengths alternate
  bool steps = false;  // also measure once by the steps of the decode kernels
  // numbers above 1: measure over each of these numbers of GPUs, after one GPU where the model fits
  std::vector<int> gpus;
  Split split = Split::tensor;
};
// The time from the call that feeds the prompt until the host knows the token that follows the prompt.
struct PromptTimes {
  int gpus = 1;
  int64_t tokens = 0;
  double p50_ms = 0, best_ms = 0, steps_ms = 0;
  double one_ms = 0;  // over several GPUs: the median on one GPU, where the model fits
  // Operations of all products, and bytes of weights, each chunk with the number of experts that random choices would
  // give. For the busiest GPU.
  double flops = 0, bytes = 0;
};
struct PromptMeasured {
  std::vector<PromptTimes> times;  // by number of GPUs, then by length
  int64_t weight_bytes = 0, chunk = 0;
};
// Throws Error{unsupported} without a GPU that runs the kernels, or with too little memory, before any memory is taken.
PromptMeasured measure_prompts(const PromptMeasurement& m);

}  // namespace ingot
