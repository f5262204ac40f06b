#pragma once
// Text from a model without a chat format, such as the models of `ingot train`.
#include "ingot/engines/generate/session.h"
#include "ingot/models/gpt/generate/decoder.h"
#include "ingot/text/tokenizer.h"

namespace ingot {

struct GenerateOptions {
  int64_t tokens = 200;
  SamplingOptions sampling;
  uint64_t seed = 1;
  bool stop_at_document_end = true;  // the tokenizer's bos ends a document
  std::vector<int32_t> stop_ids;     // further ids that end the text
};

class Generator {
 public:
  // `weights` must outlive the generator.
  Generator(const GptConfig& config, const Tensor& weights, bool looping, Products products = Products::fp32);
  explicit Generator(std::unique_ptr<Decoder> decoder);
  // Continues `prompt` (after a bos where the tokenizer has a bos). `on_token` receives each new id right after
  // sampling and ends the generation by returning false. When the context is full, its newest half is kept.
  Answer generate(const Tokenizer& tokenizer, std::span<const int32_t> prompt, const GenerateOptions& options,
                  const std::function<bool(int32_t)>& on_token = {});

 private:
  std::unique_ptr<Decoder> decoder_;
  Session session_;
};

}  // namespace ingot
