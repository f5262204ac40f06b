#pragma once
// GPT-OSS as generation sees it.
#include "ingot/models/decoder.h"
#include "ingot/models/gpt_oss/gpt_oss.h"
#include "ingot/models/options.h"

namespace ingot {

// The weights must outlive the decoder.
std::unique_ptr<Decoder> make_decoder(const GptOssConfig& config, const GptOssWeights& weights,
                                      const DecoderOptions& options);
// Memory beside the weights.
int64_t decoder_bytes(const GptOssConfig& config, int64_t layers, const DecoderOptions& options);

}  // namespace ingot
