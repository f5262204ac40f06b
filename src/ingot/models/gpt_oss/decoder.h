#pragma once
// GPT-OSS as generation sees it.
#include "ingot/models/decoder.h"
#include "ingot/models/gpt_oss/gpt_oss.h"

namespace ingot {

struct GptOssDecoderOptions {
  int64_t context = 0;  // of each slot; 0: the model's
  int64_t batch = 512;  // tokens of a prompt at a time
  int64_t slots = 1;
  int64_t gpus = 1;              // cuda:0 to cuda:(gpus - 1) share the model
  std::string split = "tensor";  // how: decode::split_named()
  bool screen = true;            // on GPUs with room for it, greedy tokens by a head in 8 bits: the same tokens
  bool together = false;         // on one GPU, slots that are asked together share a pass over the weights
};
// The weights must outlive the decoder.
std::unique_ptr<Decoder> make_decoder(const GptOssConfig& config, const GptOssWeights& weights,
                                      const GptOssDecoderOptions& options);
// Memory beside the weights.
int64_t decoder_bytes(const GptOssConfig& config, int64_t layers, const GptOssDecoderOptions& options);

}  // namespace ingot
