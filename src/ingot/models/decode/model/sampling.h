#pragma once
// The GPU memory for sampling tokens from logits on the GPU: one row of each array for every slot.
#include <optional>

#include "ingot/kernels/sampling/noise.h"
#include "ingot/kernels/sampling/sampling.h"
#include "ingot/models/decode/model/state.h"
#include "ingot/models/decode/weights/builder.h"
#include "ingot/models/host_sampling.h"

namespace ingot::decode {

constexpr int64_t kMostBiases = 1024, kMostLogprobs = 64;  // of one slot

struct SamplingBuffers {
  State* states;      // (slots): copies of the slots' states, contiguous
  SampleRow* rows;    // (2 slots): the options of the rows to sample in this step
  uint32_t* allowed;  // (slots, (V + 31) / 32)
  int32_t* bias_ids;  // (slots, kMostBiases)
  float* biases;
  char* workspace;          // of sample()
  int32_t* top;             // (slots, kMostLogprobs)
  double* logprobs;         // (slots, 1 + kMostLogprobs)
  char* logprob_workspace;  // of logprobs()
};
// The noise with which the step itself samples the token from ids below `vocab`. None if the options add biases or keep
// fewer ids, because these need all logits first.
std::optional<sampling::RowNoise> noise_of(const SlotSample& sample, int64_t vocab);
// How a step of a model with `vocab` ids samples its token.
struct StepSampling {
  uint32_t vocab = 0;     // ids from here on are not sampled
  bool id_alone = false;  // the caller will not read the logits
  sampling::RowNoise noise;

  bool operator==(const StepSampling&) const = default;
};
StepSampling step_sampling_of(const SlotSample& sample, int64_t vocab);
void build_sampling(DeviceBuilder& builder, int64_t vocab, int64_t slots, SamplingBuffers& sampling);

}  // namespace ingot::decode
