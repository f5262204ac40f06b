#pragma once
// A small random GPT-OSS checkpoint for tests of loading and generation, under any of its namings.
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ingot/io/safetensors.h"
#include "ingot/kernels/quant/quant.h"

namespace ingot::testing {

class GptOssCheckpoint {
 public:
  static constexpr int64_t kVocab = 37, kHidden = 32, kIntermediate = 64, kLayers = 2, kHeads = 4, kKvHeads = 2,
                           kHeadDim = 8, kExperts = 3, kPerToken = 2;
  explicit GptOssCheckpoint(uint64_t seed = 1) : seed_(seed) {}

  struct Options {
    bool own_names = false;
    int shards = 1;
    WeightFormat experts = WeightFormat::mxfp4;  // or bf16, as transformers writes them
    // Changes the tensors, by name, or the text of config.json, before they are written.
    std::function<void(std::map<std::string, NamedTensor>&, std::string&)> damage;
  };
  // Makes the directory and fills it.
  void write(const std::string& directory, const Options& options);
  void write(const std::string& directory) { write(directory, Options()); }

 private:
  Tensor random(Shape shape, double scale, double mean = 0);
  Tensor keep(DType dtype, Shape shape);
  void add(const std::string& name, const Tensor& t) { tensors_[name] = {name, t}; }
  void add_experts(const std::string& name, int64_t rows, int64_t cols, const Options& o);
  void add_layer(int64_t layer, const Options& o);
  uint64_t seed_, next_ = 0;
  std::vector<std::unique_ptr<std::vector<char>>> memory_;
  std::map<std::string, NamedTensor> tensors_;
};

}  // namespace ingot::testing
