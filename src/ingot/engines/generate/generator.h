#pragma once
// Text from a trained model, one token at a time, on a cache of keys and values.
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "ingot/kernels/sampling/sampling.h"
#include "ingot/models/gpt/gpt.h"
#include "ingot/text/tokenizer.h"

namespace ingot {

struct GenerateOptions {
  int64_t tokens = 200;
  SamplingOptions sampling;
  uint64_t seed = 1;
  bool stop_at_document_end = true;  // the tokenizer's bos ends a document
};

class Generator {
 public:
  // `weights` must outlive the generator.
  Generator(const GptConfig& config, const Tensor& weights, bool looping, Products products = Products::fp32);
  ~Generator();
  // Continues `prompt` (bos is put in front where the tokenizer has one) and returns the new ids. `on_token` receives
  // each as it is drawn and ends the generation by returning false. When the context is full, the newest half of it is
  // kept.
  std::vector<int32_t> generate(const Tokenizer& tokenizer, std::span<const int32_t> prompt,
                                const GenerateOptions& options, const std::function<bool(int32_t)>& on_token = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ingot
