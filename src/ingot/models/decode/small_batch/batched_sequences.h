#pragma once
// Batched sequences: one token of each of several sequences, by one pass over the weights. A few sequences take the
// phased path with one activation vector for each sequence, many sequences take the prompt path's matrix kernels
// (batch/batch.h). Keys, values and State of a sequence lie in its slot, and slots are `slot_bytes` apart.
//
// Draft steps: the rows of a step are the pending tokens and the drafts of one slot or of several. All rows store their
// keys before the attention of any row begins. (The row kernel instead computes the keys of a slot's earlier rows once
// more.) Attention is computed for each row alone, over the keys that this row sees. Therefore the numbers of a row do
// not depend on the rows after it, on other slots or on the number of rows, bit for bit.
#include "ingot/models/decode/model/state.h"

namespace ingot::decode {

constexpr uint32_t kMostSequences = 128;  // in a step
constexpr uint32_t kMostSmallBatch = 16;  // in a step by the small-batch kernels

// The input of a step in device memory, copied there before the step.
struct BatchInput {
  uint32_t count;  // number of sequences; a step by matrix kernels may compute more rows, which belong to no sequence
  uint32_t slot[kMostSequences];
  int32_t token[kMostSequences];  // -1: the slot's last sampled token, State::tokens[0]
  // Used by parts of prompts (prompt/prompt.h). In an ordinary step each sequence appends one token, and row j is
  // sequence j.
  uint32_t appended[kMostSequences];  // number of tokens that each sequence appends
  uint32_t row[kMostSequences];       // row of each sequence's last token
  // Used by draft steps: the position of each row's token. The rows of a slot are neighbours, in order.
  int32_t position[kMostSequences];
};
// Pointers into a slot are given for the first slot.
struct BatchedSequences {
  const BatchInput* input = nullptr;
  int64_t slot_bytes = 0;
  State* state = nullptr;
  float* logits = nullptr;      // (V), in the first slot
  uint32_t* arrived = nullptr;  // counters of attention, zero between launches
  uint64_t* best = nullptr;     // (sequences, kBestParts): the largest logit of each part of a row
  // results of attention's parts in a step by matrix kernels
  float *part_max = nullptr, *part_sum = nullptr, *part_out = nullptr;

  static constexpr uint32_t kBestParts = 32;
};
constexpr uint32_t kMostDraftRows = 8;  // of a draft step
// Places the arrays of BatchedSequences for steps of at most `most` sequences in device memory; returns their size in
// bytes.
int64_t lay_out(const DecoderSpec& config, int64_t most, char* memory, BatchInput*& input, BatchedSequences& sequences);

}  // namespace ingot::decode
