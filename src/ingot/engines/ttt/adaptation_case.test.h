#pragma once
// Documents, models and scores for the tests of adaptation.
#include <cmath>
#include <map>

#include "ingot/core/rng.h"
#include "ingot/engines/ttt/ttt.h"
#include "ingot/models/gpt/gpt_variants.test.h"
#include "ingot/testing/testing.h"
#include "ingot/text/tokenizer.h"

namespace ingot::testing {

// Documents of the given lengths in tokens, each beginning with bos (0), and a model with random weights.
struct AdaptationCase {
  AdaptationCase(const GptConfig& c, std::vector<int64_t> lengths, DType type = DType::f64)
      : config(c), layout(c), lengths(std::move(lengths)) {
    const Rng rng(7, Purpose::test);
    for (const int64_t n : this->lengths) {
      begins.push_back(int64_t(tokens.size()));
      tokens.push_back(0);
      for (int64_t t = 1; t < n; ++t)
        tokens.push_back(1 + int32_t(rng.below(uint64_t(tokens.size()), uint64_t(c.vocab - 1))));
    }
    memory.resize(size_t(layout.padded_count()));
    flat = Tensor(memory.data(), type, {layout.padded_count()});
    initialise(config, layout, flat, 3);
    for (const Parameter& p : layout.all())
      if (p.kind != ParameterKind::scalar)
        fill_normal(layout.view(flat, p), uint64_t(p.offset), 0.5 / std::sqrt(double(p.shape[-1]) / 24));
  }
  std::shared_ptr<const TokenSource> source() const { return tokens_in_memory(tokens, begins, 0, config.vocab); }
  AdaptationOptions options() const {
    AdaptationOptions o;
    o.adapters = {.rank = 3, .lr = 1e-2};
    o.chunk = 4, o.window = 12, o.documents = 2;
    return o;
  }
  // A tokenizer with one token per byte, and bos.
  struct ByteTokens : Tokenizer {
    explicit ByteTokens(int64_t vocab) : vocab(int(vocab)) {}
    int vocab_size() const override { return vocab; }
    int32_t bos() const override { return 0; }
    uint32_t hash() const override { return 0; }
    std::string kind() const override { return "char"; }
    std::vector<int32_t> encode(std::string_view) const override { return {}; }
    std::string decode(std::span<const int32_t>) const override { return {}; }
    std::string token_bytes(int32_t id) const override { return id == 0 ? "" : "x"; }
    int64_t bytes(int32_t, int32_t id) const override { return id == 0 ? 0 : 1; }
    int vocab;
  };

  GptConfig config;
  ParameterLayout layout;
  std::vector<int64_t> lengths, begins;
  std::vector<int32_t> tokens;
  std::vector<double> memory;
  Tensor flat;
};

// The losses of the chunks of each document, in order.
using ChunkLosses = std::map<int64_t, std::vector<double>>;
inline ChunkLosses chunk_losses(const AdaptationCase& k, const GptWeights& weights, AdaptationOptions o) {
  ChunkLosses found;
  o.listener = [&](const AdaptationEvent& e) {
    if (e.kind == AdaptationEvent::score) found[e.document].push_back(e.loss_sum);
  };
  score_adapted(k.config, weights, AdaptationCase::ByteTokens(k.config.vocab), k.source(), o);
  return found;
}

}  // namespace ingot::testing
