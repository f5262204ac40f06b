#pragma once
// Memory of a GPU for sampling a token from logits that lie there; all slots use the same.
#include "ingot/models/decode/weights/builder.h"

namespace ingot::decode {

constexpr int64_t kMostBiases = 1024, kMostLogprobs = 64;  // of one call

struct SamplingBuffers {
  float* adjusted;    // (V): logits with biases added, -infinity for ids that are not allowed
  uint32_t* allowed;  // ((V + 31) / 32)
  int32_t* bias_ids;  // (kMostBiases)
  float* biases;
  int32_t* top;      // (kMostLogprobs)
  double* logprobs;  // (1 + kMostLogprobs)
  char* workspace;   // of logprobs()
};
void build_sampling(DeviceBuilder& builder, int64_t vocab, SamplingBuffers& sampling);

}  // namespace ingot::decode
