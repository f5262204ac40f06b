#pragma once
// Batched sequences: one token of each of several sequences, by one pass over the weights. It is the phased path with
// one activation vector for each sequence. Keys, values and State of a sequence lie in its slot, and slots are
// `slot_bytes` apart.
#include "ingot/models/decode/model/state.h"

namespace ingot::decode {

constexpr uint32_t kMostSequences = 16;

// In device memory, copied there before a step.
struct BatchInput {
  uint32_t slot[kMostSequences];
  int32_t token[kMostSequences];  // -1: the greedy token of the slot's last step
};
// Pointers into a slot are those of the first slot.
struct BatchedSequences {
  const BatchInput* input = nullptr;
  int64_t slot_bytes = 0;
  State* state = nullptr;
  float* logits = nullptr;      // (V): a slot's first row
  uint32_t* arrived = nullptr;  // counters of attention, zero between launches
  uint64_t* best = nullptr;     // (kMostSequences, kBestParts): the largest logit of each part of a row

  static constexpr uint32_t kBestParts = 32;
};
// Places the arrays of BatchedSequences in device memory; returns their bytes.
int64_t lay_out(const DecoderSpec& config, char* memory, BatchInput*& input, BatchedSequences& streams);

}  // namespace ingot::decode
