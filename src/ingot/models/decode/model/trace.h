#pragma once
// The times of a token in the megakernel, by stage and SM, as a file for ui.perfetto.dev or chrome://tracing. Each
// block is a row; a token contains layers, a layer contains stages, and a stage contains the wait for all other blocks.
// With several GPUs each GPU is a process, and the stages whose parts the GPUs add up show the exchange.
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ingot/megakernel/grid_barrier.h"

namespace ingot::decode {

// The times of a stage on a block. The head is the last stage, with layer `layers`; no wait follows the head.
struct StageSpan {
  uint32_t block = 0, layer = 0, stage = 0;  // of stage_name()
  // the stage began, this block's work was done, all other blocks were done
  uint64_t begin_ns = 0, done_ns = 0, on_ns = 0;
  uint64_t bytes = 0;  // of weights; attention reads none
  // with several GPUs: this block had sent its part, and had all parts; 0: no exchange
  uint64_t sent_ns = 0, came_ns = 0;
  uint32_t gpu = 0;
};
const char* stage_name(uint32_t stage);  // "qkv" to "down", then "head"

// The spans of a launch's trace, whose words were copied from the device: by block, in order. Throws
// Error{invalid_argument} if times decrease.
std::vector<StageSpan> spans_of(const megakernel::Trace& trace, std::span<const uint64_t> words);
// How far the clock of `other` is ahead of the clock of `one`, for the same token: no GPU can receive a part before the
// part was sent.
int64_t clock_difference(std::span<const StageSpan> one, std::span<const StageSpan> other);
// The spans of a token of several GPUs as one list, by the clock of the first GPU.
std::vector<StageSpan> of_one_clock(std::vector<std::vector<StageSpan>> gpus);
// Times in microseconds since the first block began.
std::string perfetto_json(std::span<const StageSpan> spans, const std::string& title);

}  // namespace ingot::decode
