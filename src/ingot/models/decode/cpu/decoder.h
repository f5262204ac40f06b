#pragma once
// The Decoder of a decoder-only transformer on the CPU.
#include "ingot/models/decode/cpu/cpu_model.h"
#include "ingot/models/decoder.h"
#include "ingot/models/draft/head/head_weights.h"
#include "ingot/models/options.h"

namespace ingot {

// The weights, and the head if there is one, must outlive the decoder.
std::unique_ptr<Decoder> make_decoder(const DecoderSpec& spec, const DecoderWeights& weights,
                                      const DecoderOptions& options, const draft::DraftHead* head = nullptr);
// The bytes of memory that the decoder needs besides the weights and the head's.
int64_t decoder_bytes(const DecoderSpec& spec, int64_t layers, const DecoderOptions& options,
                      const draft::DraftHead* head = nullptr);

}  // namespace ingot
