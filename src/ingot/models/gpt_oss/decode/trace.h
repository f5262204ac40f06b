#pragma once
// A token's time in the megakernel, stage by stage and SM by SM, as a file for ui.perfetto.dev or chrome://tracing: a
// row a block, a token of layers of stages, in each the wait for all other blocks.
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "ingot/megakernel/handoff.h"

namespace ingot::gpt_oss_decode {

// What a stage of a block took. The head is the last one, of layer `layers`, and nobody waits after it.
struct StageSpan {
  uint32_t block = 0, layer = 0, stage = 0;       // of stage_name()
  uint64_t begin_ns = 0, done_ns = 0, on_ns = 0;  // it began, was done itself, saw that all others were
  uint64_t bytes = 0;                             // of weights; attention reads none
};
const char* stage_name(uint32_t stage);  // "qkv" to "down", then "head"

// Of a launch's trace, as it was copied from the device: by block, in order. Error{internal} where times run backwards.
std::vector<StageSpan> spans_of(const megakernel::Trace& trace, std::span<const uint64_t> words);
// Times in microseconds since the first block began.
std::string perfetto_json(std::span<const StageSpan> spans, const std::string& title);

}  // namespace ingot::gpt_oss_decode
