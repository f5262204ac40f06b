#include "ingot/models/gpt/generate/decoder.h"

#include <algorithm>
#include <numeric>

#include "ingot/models/host_decoder.h"

namespace ingot {
namespace {

class GptDecoder final : public HostDecoder {
 public:
  GptDecoder(const GptConfig& c, const Tensor& weights, bool looping, Products products, int64_t slots,
             const GptAdapters* adapters)
      : HostDecoder(slots),
        config_(c),
        weights_(weights),
        adapters_(adapters != nullptr ? *adapters : GptAdapters()),
        model_(c, weights.dtype,
               {.capacity = c.context,
                .looping = looping,
                .products = products,
                .max_adapter_rank = adapters != nullptr ? adapters->head.a.size(1) : 0}),
        cache_(c, model_.program(), slots, c.context, weights.dtype) {}

  int64_t vocab() const override { return config_.vocab; }
  int64_t context() const override { return config_.context; }
  int64_t batch() const override { return config_.context; }

 private:
  void clear(int slot) override { cache_.truncate(slot, 0); }
  int64_t cached_length(int slot) const override { return cache_.length(slot); }
  int64_t truncate(int slot, int64_t length) override {
    cache_.truncate(slot, length);
    return length;
  }
  void extend_slot(int slot, std::span<const int32_t> tokens, Rows rows, const Take& take) override {
    const int64_t n = int64_t(tokens.size()), begin = cached_length(slot);
    std::vector<int32_t> ids(tokens.begin(), tokens.end()), positions(tokens.size()), wanted;
    std::iota(positions.begin(), positions.end(), int32_t(begin));
    int32_t cu[2] = {0, int32_t(n)};
    for (int64_t t = rows == Rows::all ? 0 : n - 1; t < n; ++t) wanted.push_back(int32_t(t));
    const int64_t count = int64_t(wanted.size());
    logits_.resize(std::max(logits_.size(), size_t(count * config_.vocab)));
    const Tensor logits(logits_.data(), weights_.dtype, {count, config_.vocab});
    model_.extend(
        weights_,
        {.tokens = Tensor(ids.data(), {n}), .positions = Tensor(positions.data(), {n}), .cu_seqlens = Tensor(cu, {2})},
        {slot}, cache_, Tensor(wanted.data(), {count}), logits, adapters_.layer_calls.empty() ? nullptr : &adapters_);
    take(begin + n - count, logits);
  }

  GptConfig config_;
  Tensor weights_;
  GptAdapters adapters_;
  Gpt model_;
  GptCache cache_;
  std::vector<double> logits_;  // f32 or f64
};

}  // namespace

std::unique_ptr<Decoder> make_decoder(const GptConfig& config, const Tensor& weights, bool looping, Products products,
                                      int64_t slots, const GptAdapters* adapters) {
  return std::make_unique<GptDecoder>(config, weights, looping, products, slots, adapters);
}

}  // namespace ingot
