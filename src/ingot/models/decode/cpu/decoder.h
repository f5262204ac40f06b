#pragma once
// The Decoder of a decoder-only transformer on the CPU.
#include "ingot/models/decode/cpu/cpu_model.h"
#include "ingot/models/decoder.h"
#include "ingot/models/options.h"

namespace ingot {

// The weights must outlive the decoder.
std::unique_ptr<Decoder> make_decoder(const DecoderSpec& spec, const DecoderWeights& weights,
                                      const DecoderOptions& options);
// The bytes of memory that the decoder needs besides the weights.
int64_t decoder_bytes(const DecoderSpec& spec, int64_t layers, const DecoderOptions& options);

}  // namespace ingot
