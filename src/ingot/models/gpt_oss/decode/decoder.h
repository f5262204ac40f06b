#pragma once
// GPT-OSS on a GPU as generation sees it.
#include <string>

#include "ingot/models/gpt_oss/decoder.h"

namespace ingot {

// What keeps the model from running on cuda:0 with these options, in a line; empty where nothing does: no GPU, one that
// is not Hopper, sizes the kernels do not take, too little of its memory free (with both figures).
std::string gpt_oss_gpu_misfit(const GptOssConfig& config, const GptOssWeights& weights,
                               const GptOssDecoderOptions& options);
// The weights are copied and may be gone afterwards. Slots take turns. Cut back further than the sliding layers' rings
// reach, a slot forgets everything. Error{unsupported} with gpt_oss_gpu_misfit().
std::unique_ptr<Decoder> make_gpu_decoder(const GptOssConfig& config, const GptOssWeights& weights,
                                          const GptOssDecoderOptions& options);

}  // namespace ingot
