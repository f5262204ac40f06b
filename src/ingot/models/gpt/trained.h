#pragma once
// A model from `ingot train`, read back from its run or from the artifact of `ingot export` (artifact.h): weights,
// tokenizer and configuration.
#include <memory>
#include <string>
#include <vector>

#include "ingot/core/memory/arena.h"
#include "ingot/io/formats/safetensors.h"
#include "ingot/kernels/linear/linear.h"
#include "ingot/models/gpt/config/config.h"
#include "ingot/models/gpt/config/parameters.h"
#include "ingot/text/tokenizer.h"

namespace ingot {

struct TrainedModel {
  GptConfig config;
  Products products = Products::fp32;  // as in training
  bool looping = false;
  std::shared_ptr<const Tokenizer> tokenizer;
  Arena memory;
  Tensor weights;  // flat f32, the result weights
  int64_t step = 0;
  std::string checkpoint, parameter_hash, tokenizer_file;
  std::string run_config;        // the run's whole config.json
  std::string data_fingerprint;  // of the training tokens (data/token_source.h); empty: not known
};
// From a run's directory (its newest complete checkpoint), RUN/best, a checkpoint's directory, or an artifact.
TrainedModel load_trained(const std::string& directory);
// Whether the path may be such a model: any directory, RUN/best, or a file with an artifact's beginning. load_trained()
// reports the errors.
bool is_trained(const std::string& directory);
std::shared_ptr<const Tokenizer> trained_tokenizer(const std::string& directory);  // its tokenizer alone

// Throws where a file of adapters was made with different weights than the model's.
void require_adapters_of(const TrainedModel& model, const SafetensorsFile& adapters);

Products products_named(const std::string& name);  // fp32 or bf16

// Tensors of a flat tensor under their parameters' names.
std::vector<NamedTensor> named_tensors(const ParameterLayout& layout, const Tensor& flat,
                                       const std::string& prefix = "");
// SHA-256 over every parameter's bytes, in the layout's order.
std::string parameter_hash(const ParameterLayout& layout, const Tensor& flat);  // `flat` must be in host memory

}  // namespace ingot
