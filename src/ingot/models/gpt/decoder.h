#pragma once
// A model of `ingot train` as generation sees it.
#include "ingot/models/decoder.h"
#include "ingot/models/gpt/gpt.h"

namespace ingot {

// The weights, and what the adapters view, must outlive the decoder. Adapters are one document's: every slot reads
// them.
std::unique_ptr<Decoder> make_decoder(const GptConfig& config, const Tensor& weights, bool looping, Products products,
                                      int64_t slots = 1, const GptAdapters* adapters = nullptr);

}  // namespace ingot
