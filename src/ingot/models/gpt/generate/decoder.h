#pragma once
// Makes a Decoder of a model that `ingot train` has trained.
#include "ingot/models/decoder.h"
#include "ingot/models/gpt/gpt.h"

namespace ingot {

// The weights, and the memory of the adapters, must outlive the decoder. The adapters belong to a single document:
// every slot reads these adapters.
std::unique_ptr<Decoder> make_decoder(const GptConfig& config, const Tensor& weights, bool looping, Products products,
                                      int64_t slots = 1, const GptAdapters* adapters = nullptr);

// The same on a GPU, with copies of the weights (f32, in host memory) and of the adapters, in the products' type. A
// token of a slot is a CUDA graph including sampling; with bias, `allowed` or logprobs the logits are copied to the
// host.
std::unique_ptr<Decoder> make_device_decoder(const GptConfig& config, const Tensor& weights, bool looping,
                                             Device device, int64_t slots = 1, const GptAdapters* adapters = nullptr);

}  // namespace ingot
