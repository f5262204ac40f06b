#pragma once
// What the GPUs of a model over several tell each other between the launches of a step; within the megakernel it does
// so itself (megakernel/exchange.cuh).
#include "ingot/core/tensor.h"
#include "ingot/models/decode/model/state.h"

namespace ingot::decode {

struct RankStep {
  uint32_t T, width = 0;  // tokens; of x
  uint32_t layer;         // for the record of a wait that gave up
  bool down = false;      // down's sums, not the output's
};
// x += the ranks' parts in their order, of every token.
void add_ranks(const Buffers& buffers, const RankStep& step, Stream stream);
// Appends the likeliest id of all ranks.
void draw_over_ranks(const Buffers& buffers, const RankStep& step, Stream stream);

// Where a slot's inbox of `ranks` ranks has room: bytes, zeros at first.
int64_t inbox_bytes(const GptOssConfig& config, uint32_t ranks);
uint32_t inbox_words(const GptOssConfig& config);  // Exchange::words

}  // namespace ingot::decode
