#include "ingot/engines/generate/generator.h"

#include <algorithm>
#include <numeric>

namespace ingot {

struct Generator::Impl {
  GptConfig config;
  Tensor weights;
  Gpt model;
  GptCache cache;
  std::vector<double> logits;  // one row of f32 or f64

  Impl(const GptConfig& c, const Tensor& w, bool looping, Products products)
      : config(c),
        weights(w),
        model(c, w.dtype, {.capacity = c.context, .looping = looping, .products = products}),
        cache(c, model.program(), 1, c.context, w.dtype),
        logits(size_t(c.vocab)) {}

  Tensor row() { return Tensor(logits.data(), weights.dtype, {1, config.vocab}); }

  // Adds tokens to the cache and leaves the last one's logits in `logits`.
  void extend(std::span<const int32_t> tokens) {
    const int64_t n = int64_t(tokens.size());
    std::vector<int32_t> ids(tokens.begin(), tokens.end()), positions(tokens.size());
    std::iota(positions.begin(), positions.end(), int32_t(cache.length(0)));
    int32_t cu[2] = {0, int32_t(n)}, last[1] = {int32_t(n - 1)};
    const TokenBatch batch{
        .tokens = Tensor(ids.data(), {n}), .positions = Tensor(positions.data(), {n}), .cu_seqlens = Tensor(cu, {2})};
    model.extend(weights, batch, {0}, cache, Tensor(last, {1}), row());
  }
};

Generator::Generator(const GptConfig& config, const Tensor& weights, bool looping, Products products)
    : impl_(std::make_unique<Impl>(config, weights, looping, products)) {}
Generator::~Generator() = default;

std::vector<int32_t> Generator::generate(const Tokenizer& tokenizer, std::span<const int32_t> prompt,
                                         const GenerateOptions& options, const std::function<bool(int32_t)>& on_token) {
  Impl& m = *impl_;
  check(options.sampling);
  INGOT_CHECK_GE(options.tokens, int64_t(0), "generate: tokens");
  INGOT_CHECK_EQ(int64_t(tokenizer.vocab_size()), m.config.vocab,
                 "generate: vocabulary of the tokenizer and the model");
  std::vector<int32_t> all;  // everything the model has been told, prompt included
  if (tokenizer.bos() >= 0) all.push_back(tokenizer.bos());
  all.insert(all.end(), prompt.begin(), prompt.end());
  if (all.empty())
    fail(ErrorCode::usage,
         "generate: found an empty prompt, and this tokenizer has no start token; expected some text");
  const size_t told = all.size();
  m.cache.truncate(0, 0);
  const int64_t context = m.config.context;
  size_t next = all.size() > size_t(context) ? all.size() - size_t(context) : 0;  // the first token not in the cache
  for (int64_t i = 0; i < options.tokens; ++i) {
    if (m.cache.length(0) + int64_t(all.size() - next) > context) {
      m.cache.truncate(0, 0);
      next = all.size() - size_t(std::max<int64_t>(1, context / 2));
    }
    m.extend(std::span(all).subspan(next));
    next = all.size();
    int32_t token = 0;
    sample({.logits = m.row(),
            .tokens = Tensor(&token, {1}),
            .options = options.sampling,
            .seed = options.seed,
            .step = uint32_t(i)},
           {});
    if (options.stop_at_document_end && token == tokenizer.bos()) break;
    all.push_back(token);
    if (on_token && !on_token(token)) break;
  }
  return {all.begin() + std::ptrdiff_t(told), all.end()};
}

}  // namespace ingot
