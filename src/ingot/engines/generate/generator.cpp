#include "ingot/engines/generate/generator.h"

namespace ingot {

Generator::Generator(const GptConfig& config, const Tensor& weights, bool looping, Products products)
    : Generator(make_decoder(config, weights, looping, products)) {}
Generator::Generator(std::unique_ptr<Decoder> decoder) : decoder_(std::move(decoder)), session_(*decoder_) {}

Answer Generator::generate(const Tokenizer& tokenizer, std::span<const int32_t> prompt, const GenerateOptions& options,
                           const std::function<bool(int32_t)>& on_token) {
  INGOT_CHECK(int64_t(tokenizer.vocab_size()) == decoder_->vocab(), "generate: found a tokenizer of ",
              tokenizer.vocab_size(), " tokens, expected the model's ", decoder_->vocab());
  std::vector<int32_t> all;  // all tokens of the sequence, the prompt included
  if (tokenizer.bos() >= 0) all.push_back(tokenizer.bos());
  all.insert(all.end(), prompt.begin(), prompt.end());
  if (all.empty())
    fail(ErrorCode::usage,
         "generate: found an empty prompt, and this tokenizer has no start token; expected some text");
  SessionOptions o;
  o.tokens = options.tokens;
  o.sampling = options.sampling;
  o.seed = options.seed;
  o.slide = true;
  o.on_token = on_token;
  o.stop_ids = options.stop_ids;
  if (options.stop_at_document_end && tokenizer.bos() >= 0) o.stop_ids.push_back(tokenizer.bos());
  session_.forget();  // a slot with reused tokens could round differently, so a seed could give another text
  return session_.generate(all, o);
}

}  // namespace ingot
