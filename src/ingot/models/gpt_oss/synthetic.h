#pragma once
// GPT-OSS with random weights, for measurements and load tests without a download. The name of such a model is used in
// place of a path: "synthetic:20b", "synthetic:120b:fp8". On a GPU the weights are generated on the GPU; a CPU runs
// only "synthetic:small". Answers are random text.
#include <optional>
#include <string>

#include "ingot/kernels/quant/quant.h"
#include "ingot/models/gpt_oss/config.h"
#include "ingot/text/byte_bpe.h"

namespace ingot {

struct SyntheticModel {
  std::string size;                         // as in synthetic_gpt_oss()
  WeightFormat dense = WeightFormat::bf16;  // the format of qkv, output and head; experts are mxfp4
};
// Returns nothing where the name does not begin with "synthetic:". Throws Error{usage} for an unknown size or format.
std::optional<SyntheticModel> synthetic_model(const std::string& name);

// A tokenizer of the model's vocabulary: the 256 bytes, words of letters without merges (so that text is encoded byte
// by byte), and the special tokens of o200k_harmony at the end, as in the published vocabulary.
ByteBpe synthetic_tokenizer(const GptOssConfig& config);

}  // namespace ingot
