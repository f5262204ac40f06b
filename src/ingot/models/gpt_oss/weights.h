#pragma once
// The weights of a GPT-OSS model in memory, and their reading from a checkpoint or an archive.
#include "ingot/models/decoder_weights.h"
#include "ingot/models/gpt_oss/config.h"

namespace ingot {

// In a checkpoint, matrices are bf16 or f32, and experts may be mxfp4, stored by rows. In an archive (archive.h),
// matrices are bf16, fp8 or mxfp4, stored in weight tiles except for the embedding.
using GptOssLayer = DecoderLayer;
using GptOssWeights = DecoderWeights;

struct GptOssLoad {
  int64_t layers = 0;       // the number of layers to read, from the first; 0: all
  int64_t other_bytes = 0;  // memory that the caller will need in addition, for the check before reading
  // the weights go to a device: an archive is read where the file is mapped, and needs no host memory
  bool passed_on = false;
};
// Maps an .ingot archive, or reads a checkpoint in any of its forms: Hugging Face's with mxfp4 blocks and scales,
// OpenAI's own, an .iris file, a GGUF file (matrices become bf16, except in F32 and for experts in MXFP4), and the form
// that transformers writes (experts (E, C, 2I) and (E, I, C), transposed here). Every tensor must exist with the
// config's shape and a supported type, and no tensor may remain unused (except those of layers beyond `layers`). Memory
// is checked before anything is allocated.
GptOssWeights load_gpt_oss(const std::string& path, const GptOssConfig& config, const GptOssLoad& load = {});

// The same without data, from the headers alone, to find out whether a device has room for the weights.
GptOssWeights gpt_oss_shapes(const std::string& path, const GptOssConfig& config, const GptOssLoad& load = {});

// Memory the weights of `load.layers` layers will take, from the headers alone.
int64_t gpt_oss_weight_bytes(const std::string& path, const GptOssConfig& config, const GptOssLoad& load = {});

}  // namespace ingot
