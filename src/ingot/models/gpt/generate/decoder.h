#pragma once
// A model of `ingot train` as generation sees it.
#include "ingot/models/decoder.h"
#include "ingot/models/gpt/gpt.h"

namespace ingot {

// The weights, and what the adapters view, must outlive the decoder. Adapters are one document's: every slot reads
// them.
std::unique_ptr<Decoder> make_decoder(const GptConfig& config, const Tensor& weights, bool looping, Products products,
                                      int64_t slots = 1, const GptAdapters* adapters = nullptr);

// The same on a GPU, which holds copies of the weights (f32, in host memory); adapters lie there, in the products'
// type. A token of one slot is a CUDA graph with the draw in it; with bias, `allowed` or logprobs logits come to the
// host.
std::unique_ptr<Decoder> make_device_decoder(const GptConfig& config, const Tensor& weights, bool looping,
                                             Device device, int64_t slots = 1, const GptAdapters* adapters = nullptr);

}  // namespace ingot
