#include "ingot/engines/generate/decoder.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace ingot {
namespace {

// log(sum exp(row)) - row[target]
template <class T> double loss_of(const T* row, int64_t vocab, int32_t target) {
  const T top = *std::max_element(row, row + vocab);
  double sum = 0;
  for (int64_t v = 0; v < vocab; ++v) sum += std::exp(double(row[v]) - double(top));
  return std::log(sum) + double(top) - double(row[target]);
}

void check_length(const Decoder& d, int64_t more) {
  INGOT_CHECK(more >= 1 && more <= d.batch(), "decoder: found ", more, " tokens to append, expected 1 to ", d.batch());
  if (d.length() + more > d.context())
    fail(ErrorCode::usage, "found ", d.length() + more, " tokens, expected at most ", d.context(), ", the context");
}

// --- models of `ingot train` -------------------------------------------------------------------------------------
class GptDecoder final : public Decoder {
 public:
  GptDecoder(const GptConfig& c, const Tensor& weights, bool looping, Products products)
      : config_(c),
        weights_(weights),
        model_(c, weights.dtype, {.capacity = c.context, .looping = looping, .products = products}),
        cache_(c, model_.program(), 1, c.context, weights.dtype) {}

  int64_t vocab() const override { return config_.vocab; }
  int64_t context() const override { return config_.context; }
  int64_t batch() const override { return config_.context; }
  int64_t length() const override { return cache_.length(0); }
  int64_t rewind(int64_t length) override {
    cache_.truncate(0, length);
    return length;
  }
  void extend(std::span<const int32_t> tokens, Rows rows, const Take& take) override {
    const int64_t n = int64_t(tokens.size()), begin = length();
    check_length(*this, n);
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
        {0}, cache_, Tensor(wanted.data(), {count}), logits);
    take(begin + n - count, logits);
  }

 private:
  GptConfig config_;
  Tensor weights_;
  Gpt model_;
  GptCache cache_;
  std::vector<double> logits_;  // f32 or f64
};

// --- GPT-OSS -----------------------------------------------------------------------------------------------------
constexpr int64_t kLogitNumbers = 16 << 20;  // of one block of logit rows: 64 MB
constexpr size_t kSnapshots = 8;             // places to go back to; each holds the sliding layers' windows

class GptOssDecoder final : public Decoder {
 public:
  GptOssDecoder(const GptOssConfig& c, const GptOssWeights& weights, const GptOssDecoderOptions& o)
      : config_(c),
        model_(c, weights, {.batch = o.batch, .positions = context_of(c, o)}),
        cache_(c, model_.layers(), context_of(c, o), o.batch) {}
  static int64_t context_of(const GptOssConfig& c, const GptOssDecoderOptions& o) {
    if (o.context < 0 || o.context > c.context)
      fail(ErrorCode::usage, "context: found ", o.context, ", expected 1 to ", c.context, ", or 0 for the model's");
    return o.context == 0 ? c.context : o.context;
  }

  int64_t vocab() const override { return config_.vocab; }
  int64_t context() const override { return cache_.capacity(); }
  int64_t batch() const override { return model_.batch(); }
  int64_t length() const override { return cache_.length(); }

  void extend(std::span<const int32_t> ids, Rows rows, const Take& take) override {
    const int64_t n = int64_t(ids.size()), begin = length();
    check_length(*this, n);
    const Tensor normed = model_.extend(ids, cache_);
    const int64_t block = std::max<int64_t>(1, kLogitNumbers / config_.vocab);
    for (int64_t t = rows == Rows::all ? 0 : n - 1; t < n; t += block) {
      const int64_t count = std::min(block, n - t);
      logits_.resize(std::max(logits_.size(), size_t(count * config_.vocab)));
      const Tensor logits(logits_.data(), {count, config_.vocab});
      model_.logits(normed.slice(0, t, t + count), logits);
      take(begin + t, logits);
    }
  }

  int64_t rewind(int64_t length) override {
    if (!cache_.can_rewind(length))
      for (const auto& s : snapshots_)
        if (cache_.leads_to(s, length)) {
          cache_.restore(s);
          break;
        }
    while (!snapshots_.empty() && snapshots_.back().length > length) snapshots_.pop_back();
    if (cache_.can_rewind(length))
      cache_.rewind(length);
    else if (!snapshots_.empty())
      cache_.restore(snapshots_.back());
    else
      cache_.rewind(0);
    return cache_.length();
  }

  void mark() override {
    if (!snapshots_.empty() && snapshots_.back().length == length()) return;
    // The oldest but the first goes: the first is often a system prompt that every conversation shares.
    if (snapshots_.size() == kSnapshots) snapshots_.erase(snapshots_.begin() + 1);
    snapshots_.push_back(cache_.snapshot());
  }

 private:
  GptOssConfig config_;
  GptOss model_;
  GptOssCache cache_;
  std::vector<GptOssCache::Snapshot> snapshots_;  // of growing length, all of this sequence
  std::vector<float> logits_;
};

}  // namespace

std::vector<double> sequence_losses(Decoder& decoder, std::span<const int32_t> ids,
                                    const std::function<bool()>& cancelled) {
  std::vector<double> losses;
  decoder.rewind(0);
  const int64_t n = int64_t(ids.size());
  for (int64_t at = 0; at + 1 < n;) {
    if (cancelled && cancelled()) fail(ErrorCode::interrupted, "stopped by a signal");
    const int64_t count = std::min(decoder.batch(), n - at);
    decoder.extend(
        ids.subspan(size_t(at), size_t(count)), Decoder::Rows::all, [&](int64_t first, const Tensor& logits) {
          for (int64_t i = 0; i < logits.size(0) && first + i + 1 < n; ++i) {
            const int32_t target = ids[size_t(first + i + 1)];
            if (target < 0 || target >= decoder.vocab())
              fail(ErrorCode::bad_data, "found id ", target, " at position ", first + i + 1, ", expected 0 to ",
                   decoder.vocab() - 1);
            losses.push_back(logits.dtype == DType::f64
                                 ? loss_of(logits.ptr<double>() + i * decoder.vocab(), decoder.vocab(), target)
                                 : loss_of(logits.ptr<float>() + i * decoder.vocab(), decoder.vocab(), target));
          }
        });
    at += count;
  }
  return losses;
}

std::unique_ptr<Decoder> make_decoder(const GptConfig& config, const Tensor& weights, bool looping, Products products) {
  return std::make_unique<GptDecoder>(config, weights, looping, products);
}
std::unique_ptr<Decoder> make_decoder(const GptOssConfig& config, const GptOssWeights& weights,
                                      const GptOssDecoderOptions& options) {
  return std::make_unique<GptOssDecoder>(config, weights, options);
}

int64_t decoder_bytes(const GptOssConfig& c, int64_t layers, const GptOssDecoderOptions& o) {
  const int64_t context = GptOssDecoder::context_of(c, o);
  return GptOss::workspace_bytes(c, {.batch = o.batch, .positions = context}) +
         GptOssCache::bytes(c, layers, context, o.batch) + std::max(c.vocab, kLogitNumbers) * 4;
}

}  // namespace ingot
