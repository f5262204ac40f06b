#pragma once
// A trained model in few bytes: one file.
//
//   "INGOTGPT"   u32 version   u32 bytes of the description   u32 CRC-32C of it
//   description  JSON: the run's model and what scoring needs of its options, layer program, step, tokenizer's hash
//   table        of every parameter, in ParameterLayout's order: u8 bits, u32 bytes, u32 CRC-32C of these
//   u32 CRC-32C  of all before it
//   tensors      one after the other, and nothing after the last. Bits 4 to 8: an fp16 scale per row, then the integers
//                by io/integer_coder; 16: fp16 numbers
//
// All integers little-endian. A weight is its row's scale times its integer. The tokenizer lies beside the file, under
// its name with ".tokenizer" after it.
#include <string>
#include <string_view>
#include <vector>

#include "ingot/core/dtype.h"
#include "ingot/models/gpt/parameters.h"

namespace ingot {

constexpr uint32_t kArtifactVersion = 1;

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
  std::vector<ArtifactTensor> tensors;  // in ParameterLayout's order
};

// Error{bad_data} names `name`, what was found and what was expected. What a parsed artifact takes of memory is bounded
// by the bytes given.
std::string artifact_bytes(const Artifact& a);
Artifact parse_artifact(std::string_view bytes, const std::string& name);
bool is_artifact(const std::string& path);  // by its first bytes

void dequantize(const Artifact& a, const ParameterLayout& layout, const Tensor& flat);  // f32, in host memory
inline std::string artifact_tokenizer(const std::string& path) { return path + ".tokenizer"; }

}  // namespace ingot
