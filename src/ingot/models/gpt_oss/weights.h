#pragma once
// The weights of a GPT-OSS model in memory, and their reading from a checkpoint or an archive.
#include "ingot/models/decoder_weights.h"
#include "ingot/models/gpt_oss/config.h"

namespace ingot {

// Of a checkpoint matrices are bf16 or f32, experts also mxfp4, in rows; of an archive (archive.h) bf16, fp8 or mxfp4,
// in weight tiles but for the embedding.
using GptOssLayer = DecoderLayer;
using GptOssWeights = DecoderWeights;

struct GptOssLoad {
  int64_t layers = 0;       // the first so many; 0: all
  int64_t other_bytes = 0;  // memory the caller will want beside the weights, for the check before reading
  bool passed_on = false;   // to a device: an archive, which is read where it lies, needs no memory of the host's
};
// Maps an .ingot archive, or reads a checkpoint in any of its namings: Hugging Face's with mxfp4 blocks and scales,
// OpenAI's own, an .iris file's, a GGUF file's (what has more than 4 and fewer than 32 bits becomes bf16), and what
// transformers writes (experts (E, C, 2I) and (E, I, C), turned here). Every tensor must be there with the config's
// shape and a type that serves, and none may be left over (but those of layers beyond `layers`). Memory is checked
// before any of it is taken.
GptOssWeights load_gpt_oss(const std::string& path, const GptOssConfig& config, const GptOssLoad& load = {});

// The same without their memory, from the headers alone: what says whether a device has room for them.
GptOssWeights gpt_oss_shapes(const std::string& path, const GptOssConfig& config, const GptOssLoad& load = {});

// Memory the weights of `load.layers` layers will take, from the headers alone.
int64_t gpt_oss_weight_bytes(const std::string& path, const GptOssConfig& config, const GptOssLoad& load = {});

}  // namespace ingot
