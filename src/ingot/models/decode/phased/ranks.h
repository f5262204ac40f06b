#pragma once
// The exchanges between the GPUs of a model in the phased path: separate kernels between the phases. The megakernel
// exchanges parts inside its kernel (megakernel/rank_exchange.cuh).
#include "ingot/core/tensor.h"
#include "ingot/models/decode/model/state.h"

namespace ingot::decode {

struct RankStep {
  uint32_t T, width = 0;  // T: tokens; width: of a row of x
  uint32_t layer;         // for the report of a wait that gives up
  bool down = false;      // the sums of the product down, in place of those of the output
};
// x += the parts of all ranks, in the order of the ranks, for every token.
void add_ranks(const Buffers& buffers, const RankStep& step, Stream stream);
// Appends the id of the largest logit of all ranks.
void sample_over_ranks(const Buffers& buffers, const RankStep& step, Stream stream);

// Bytes of the inbox of a GPU, which all slots share and which receives from `ranks` ranks; zeros at first.
int64_t inbox_bytes(const DecoderSpec& config, uint32_t ranks);
uint32_t inbox_words(const DecoderSpec& config);  // Exchange::words

}  // namespace ingot::decode
