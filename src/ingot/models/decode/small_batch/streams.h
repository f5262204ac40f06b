#pragma once
// A token of each of several sequences, by one pass over the weights: the phased path with a column a sequence. What a
// sequence has of its own, keys, values and State, lies as often as there are slots, `slot_bytes` apart.
#include "ingot/models/decode/model/state.h"

namespace ingot::decode {

constexpr uint32_t kMostStreams = 16;

// On the device, sent before a step.
struct StreamsInput {
  uint32_t slot[kMostStreams];
  int32_t token[kMostStreams];  // -1: what the slot's last step found likeliest
};
// Pointers to things of a slot are the first slot's.
struct Streams {
  const StreamsInput* input = nullptr;
  int64_t slot_bytes = 0;
  State* state = nullptr;
  float* logits = nullptr;      // (V): a slot's first row
  uint32_t* arrived = nullptr;  // of attention, zero between launches
  uint64_t* best = nullptr;     // (kMostStreams, kBestParts): of parts of a row the likeliest

  static constexpr uint32_t kBestParts = 32;
};
// Places what Streams has of its own in the device's memory; returns its bytes.
int64_t lay_out(const GptOssConfig& config, char* memory, StreamsInput*& input, Streams& streams);

}  // namespace ingot::decode
