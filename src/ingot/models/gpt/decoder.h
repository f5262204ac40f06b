#pragma once
// A model of `ingot train` as generation sees it.
#include "ingot/models/decoder.h"
#include "ingot/models/gpt/gpt.h"

namespace ingot {

// The weights must outlive the decoder.
std::unique_ptr<Decoder> make_decoder(const GptConfig& config, const Tensor& weights, bool looping, Products products,
                                      int64_t slots = 1);

}  // namespace ingot
