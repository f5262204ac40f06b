#pragma once
// Batched sequences: one token of each of several sequences, by one pass over the weights. Few sequences take the
// phased path with one activation vector for each sequence, many take the prompt path's matrix kernels (batch/batch.h).
// Keys, values and State of a sequence lie in its slot, and slots are `slot_bytes` apart.
#include "ingot/models/decode/model/state.h"

namespace ingot::decode {

constexpr uint32_t kMostSequences = 128;  // of a step
constexpr uint32_t kMostSmallBatch = 16;  // of a step by the small-batch kernels

// In device memory, copied there before a step.
struct BatchInput {
  uint32_t count;  // sequences; a step by matrix kernels may compute more rows, which belong to no sequence
  uint32_t slot[kMostSequences];
  int32_t token[kMostSequences];  // -1: the greedy token of the slot's last step
  // Of parts of prompts (prompt/prompt.h); in a step each sequence appends one token, and row j is sequence j.
  uint32_t appended[kMostSequences];  // tokens
  uint32_t row[kMostSequences];       // of the last one
};
// Pointers into a slot are those of the first slot.
struct BatchedSequences {
  const BatchInput* input = nullptr;
  int64_t slot_bytes = 0;
  State* state = nullptr;
  float* logits = nullptr;      // (V): a slot's first row
  uint32_t* arrived = nullptr;  // counters of attention, zero between launches
  uint64_t* best = nullptr;     // (sequences, kBestParts): the largest logit of each part of a row
  float *part_max = nullptr, *part_sum = nullptr, *part_out = nullptr;  // of attention in a step by matrix kernels

  static constexpr uint32_t kBestParts = 32;
};
// Places the arrays of BatchedSequences for steps of at most `most` sequences in device memory; returns their bytes.
int64_t lay_out(const DecoderSpec& config, int64_t most, char* memory, BatchInput*& input, BatchedSequences& streams);

}  // namespace ingot::decode
