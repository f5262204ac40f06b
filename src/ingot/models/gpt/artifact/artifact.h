#pragma once
// A trained model as a single small file.
//
//   "INGOTGPT"
//   u32 version
//   u32 bytes    of the description
//   u32 CRC-32C  of the description
//   description  JSON: the run's model and the options for scoring, layer program, step, tokenizer's hash
//   u8 coder     an ArtifactCoder; missing in version 1, where it is `range`
//   table        for every parameter, in ParameterLayout's order: u8 bits, u32 bytes, u32 CRC-32C of these bytes
//   u32 bytes    and u32 CRC-32C of the coded tensors together; missing with `range`
//   u32 CRC-32C  of everything before it
//   tensors      one after the other, and nothing after the last. Bits 4 to 8: an fp16 scale per row, then the
//                integers by io/integer_coder. Bits 16: fp16 numbers; with `range` their lower bytes, then their upper
//                bytes by io/integer_coder, in versions 1 and 2 as they are. With brotli and lzma: integers as bytes,
//                and all tensors in one stream of io/byte_coder; the table counts the bytes before compression.
//
// All integers little-endian. A weight is its row's scale times its integer. The tokenizer lies beside the file, under
// its name with ".tokenizer" after it.
#include <string>
#include <string_view>
#include <vector>

#include "ingot/core/dtype.h"
#include "ingot/models/gpt/config/parameters.h"

namespace ingot {

constexpr uint32_t kArtifactVersion = 3;  // 1 and 2 are read too

// The coder of the tensors.
enum class ArtifactCoder : uint8_t { range = 0, brotli = 1, lzma = 2 };
const char* name_of(ArtifactCoder c);
ArtifactCoder artifact_coder_named(const std::string& name);  // Error{unsupported} where this build lacks the coder

struct ArtifactTensor {
  int bits = 16;
  std::vector<f16> numbers;    // at 16 bits the tensor's; else a scale per row
  std::vector<int8_t> values;  // [rows, cols]; none at 16 bits
};
struct Artifact {
  std::string run_config;  // {"model": ..., "train": ...}, as a run's config.json
  GptConfig config;        // its model
  bool looping = false;
  int64_t step = 0;
  uint32_t tokenizer_hash = 0;
  ArtifactCoder coder = ArtifactCoder::range;
  std::vector<ArtifactTensor> tensors;  // in ParameterLayout's order
};

// Error{bad_data} names `name`, the value found and the value expected. The memory of a parsed artifact is bounded by
// the number of bytes given.
std::string artifact_bytes(const Artifact& a);
Artifact parse_artifact(std::string_view bytes, const std::string& name);
bool is_artifact(const std::string& path);  // by its first bytes
struct ArtifactForm {
  uint32_t version = 0;
  ArtifactCoder coder = ArtifactCoder::range;
};
ArtifactForm artifact_form(std::string_view bytes, const std::string& name);  // of a file for parse_artifact

void dequantize(const Artifact& a, const ParameterLayout& layout, const Tensor& flat);  // f32, in host memory
inline std::string artifact_tokenizer(const std::string& path) { return path + ".tokenizer"; }

}  // namespace ingot
