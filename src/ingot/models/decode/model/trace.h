#pragma once
// A token's time in the megakernel, stage by stage and SM by SM, as a file for ui.perfetto.dev or chrome://tracing: a
// row a block, a token of layers of stages, in each the wait for all other blocks. Of several GPUs each is a process,
// and the stages whose parts they add up show the exchange.
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ingot/megakernel/grid_barrier.h"

namespace ingot::decode {

// What a stage of a block took. The head is the last one, of layer `layers`, and nobody waits after it.
struct StageSpan {
  uint32_t block = 0, layer = 0, stage = 0;       // of stage_name()
  uint64_t begin_ns = 0, done_ns = 0, on_ns = 0;  // it began, was done itself, saw that all others were
  uint64_t bytes = 0;                             // of weights; attention reads none
  uint64_t sent_ns = 0, came_ns = 0;              // over several GPUs: it had sent its part, had all; 0: no exchange
  uint32_t gpu = 0;
};
const char* stage_name(uint32_t stage);  // "qkv" to "down", then "head"

// Of a launch's trace, as it was copied from the device: by block, in order. Error{internal} where times run backwards.
std::vector<StageSpan> spans_of(const megakernel::Trace& trace, std::span<const uint64_t> words);
// How far the clock of `other` is ahead of that of `one`, both of the same token: nobody had a part before it was sent.
int64_t clock_difference(std::span<const StageSpan> one, std::span<const StageSpan> other);
// The spans of a token of several GPUs as one list, by the first one's clock.
std::vector<StageSpan> of_one_clock(std::vector<std::vector<StageSpan>> gpus);
// Times in microseconds since the first block began.
std::string perfetto_json(std::span<const StageSpan> spans, const std::string& title);

}  // namespace ingot::decode
