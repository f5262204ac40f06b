#pragma once
// The GPU memory for sampling tokens from rows of logits on the GPU: one row of each array for every slot, or for every
// row of a draft step.
#include <optional>

#include "ingot/kernels/sampling/noise.h"
#include "ingot/kernels/sampling/sampling.h"
#include "ingot/models/decode/model/state.h"
#include "ingot/models/decode/weights/builder.h"
#include "ingot/models/host_sampling.h"

namespace ingot::decode {

constexpr int64_t kMostBiases = 1024, kMostLogprobs = 64;  // of one slot

struct SamplingBuffers {
  int64_t count;      // R, the number of rows
  SampleRow* rows;    // (2 R): the options of the rows to sample in this step, then of the rows to score
  uint32_t* allowed;  // (R, (V + 31) / 32)
  int32_t* bias_ids;  // (R, kMostBiases)
  float* biases;
  char* workspace;          // of sample()
  int32_t* top;             // (R, kMostLogprobs)
  double* logprobs;         // (R, 1 + kMostLogprobs)
  char* logprob_workspace;  // of logprobs()
};
// The biases and the mask that a row of SamplingBuffers holds.
struct SentAdjustments {
  std::vector<LogitBias> bias;
  std::vector<uint32_t> allowed;
};
// The rows that a step samples, and the rows whose logprobs it computes.
struct SampledRows {
  std::vector<SampleRow> sampled, scored;
  bool some_filtered = false, some_unfiltered = false;
  int64_t top = 0;  // the largest number of likeliest ids that any row requests

  void add(const SlotSample& sample, int64_t vocab, int row);
  void add_logprobs(const SlotSample& sample, int64_t vocab, int row);
};
// The noise with which the step itself samples the token from ids below `vocab`. None if the options add biases or
// filter ids, because biases and filters need all logits first.
std::optional<sampling::RowNoise> noise_of(const SlotSample& sample, int64_t vocab);
// How a step of a model with `vocab` ids samples its token.
struct StepSampling {
  uint32_t vocab = 0;     // ids from here on are not sampled
  bool id_alone = false;  // the caller will not read the logits
  sampling::RowNoise noise;

  bool operator==(const StepSampling&) const = default;
};
StepSampling step_sampling_of(const SlotSample& sample, int64_t vocab);
void build_sampling(DeviceBuilder& builder, int64_t vocab, int64_t rows, SamplingBuffers& sampling);

}  // namespace ingot::decode
