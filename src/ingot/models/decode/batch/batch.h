#pragma once
// A step of many sequences by the prompt path's matrix kernels: a token of each of up to kMostSequences sequences is a
// row of the same products that compute a prompt (prompt/prompt.h). On Hopper the dense products of up to 64 rows take
// a kernel of their own with the same bits (batch_linear.h), and one kernel computes norm, router, choice and places
// (batch_router.cuh). Attention of a row reads the keys of the row's own slot; head, greedy token and position are
// computed for all rows. The number of rows is rounded up to one of kBatchRows, so that a few CUDA graphs serve every
// number of sequences. No slot and no expert reads the results of the rows beyond the last sequence.
//
// Every number of a row is a sum computed by one thread in one order, which depends neither on the other rows nor on
// the number of rows. The numbers differ from those of the other paths by roundings.
#include <algorithm>

#include "ingot/core/tensor.h"
#include "ingot/kernels/attention/decode_params.h"
#include "ingot/models/decode/small_batch/batched_sequences.h"

namespace ingot::decode {

constexpr uint32_t kBatchRows[] = {16, 24, 32, 48, 64, 96, 128};
constexpr uint32_t batch_rows(uint32_t sequences) {
  for (const uint32_t rows : kBatchRows)
    if (sequences <= rows) return rows;
  return kMostSequences;
}
// Steps of up to this number of sequences take the small-batch kernels, larger steps the matrix kernels, as measured
// for mixtures of experts (docs/lab/gpt-oss-decode.md#many-sequences) and dense models
// (docs/lab/families-decode.md#steps-of-several-sequences).
constexpr int64_t small_batch_sequences(bool hopper, bool experts) { return !hopper ? 12 : experts ? 8 : 7; }

// Attention divides the keys of a row into parts whose number and sizes do not depend on the rows of the step.
constexpr uint32_t kBatchParts = 4, kShortBatchWindow = 256, kKeysOfBatchPart = 1536;
constexpr uint32_t batch_parts(uint32_t window, uint32_t capacity) {
  if (window > 0 && window <= kShortBatchWindow) return 1;
  return std::min(decode_attention::parts_of(1, window, capacity), kBatchParts);
}

// ids[j] = the token of sequence j; rows without a sequence have token 0.
void gather_batch(const BatchedSequences& s, int32_t* ids, int64_t T, int device, Stream stream);
// Stores the new keys and values and writes `mixed_rows`. `p` holds the parameters for one token of the first slot;
// attend_batch() fills in position, parts and counters.
struct BatchAttention {
  uint32_t cache_dim;
  float softcap;  // of scores; needs rows of kWideDim numbers
};
void attend_batch(const BatchedSequences& s, decode_attention::Params p, const BatchAttention& how, int64_t T,
                  int device, Stream stream);
// Gives each slot its row of the logits (T, ids), the likeliest id below `vocab`, and its new position.
struct BatchLogits {
  const float* logits;
  int64_t T, ids, vocab;
  const uint32_t* stop;  // the field of Buffers
};
void scatter_batch(const BatchedSequences& s, const BatchLogits& rows, int device, Stream stream);

}  // namespace ingot::decode
