#include "ingot/models/host_sampling.h"

#include <algorithm>
#include <cstring>

#include "ingot/kernels/sampling/logprobs.h"

namespace ingot {

std::vector<LogitBias> in_order(std::span<const LogitBias> bias) {
  std::vector<LogitBias> sorted(bias.begin(), bias.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return sorted;
}

int32_t sample_from(const Tensor& row, const SampleOptions& o, uint32_t step) {
  const int64_t vocab = o.vocab > 0 ? o.vocab : row.numel();
  std::vector<int32_t> ids;
  std::vector<float> biases;
  for (const LogitBias& b : in_order(o.bias)) ids.push_back(b.id), biases.push_back(b.bias);
  const int64_t n = int64_t(ids.size());
  int32_t token = 0;
  ingot::sample({.logits = Tensor(row.data, row.dtype, {1, vocab}),
                 .tokens = Tensor(&token, {1}),
                 .options = o.sampling,
                 .seed = o.seed,
                 .step = step,
                 .bias_ids = n > 0 ? Tensor(ids.data(), {1, n}) : Tensor(),
                 .biases = n > 0 ? Tensor(biases.data(), {1, n}) : Tensor(),
                 .allowed = o.allowed.empty() ? Tensor() : Tensor(o.allowed.data(), {1, int64_t(o.allowed.size())})},
                {});
  return token;
}

TokenLogprobs logprobs_of(const Tensor& row, int64_t vocab, int32_t sampled, int64_t top) {
  std::vector<int32_t> ids(size_t(top), -1);
  std::vector<double> values(size_t(1 + top));
  logprobs({.logits = Tensor(row.data, row.dtype, {vocab}),
            .token = Tensor(&sampled, {1}),
            .top = top > 0 ? Tensor(ids.data(), {top}) : Tensor(),
            .values = Tensor(values.data(), {1 + top})},
           {});
  return logprobs_of(ids, values);
}
TokenLogprobs logprobs_of(std::span<const int32_t> top, std::span<const double> values) {
  TokenLogprobs all{.sampled = values[0]};
  for (size_t i = 0; i < top.size(); ++i) all.top.push_back({top[i], values[1 + i]});
  return all;
}

SlotSampled sample_row(const Tensor& row, const SlotSample& sample) {
  const SampleOptions& o = *sample.options;
  SlotSampled sampled;
  try {
    sampled.token.token = sample_from(row, o, sample.step);
    if (o.logprobs >= 0)
      sampled.token.logprobs = logprobs_of(row, o.vocab > 0 ? o.vocab : row.numel(), sampled.token.token, o.logprobs);
  } catch (...) { sampled.error = std::current_exception(); }
  return sampled;
}

void HostLogits::store(int slot, const Tensor& logits) {
  Row& kept = rows_[size_t(slot)];
  const Tensor row = logits.row(logits.size(0) - 1);
  kept.dtype = row.dtype;
  kept.bytes.resize(size_t(row.bytes()));
  std::memcpy(kept.bytes.data(), row.data, kept.bytes.size());
}

Decoder::Take HostLogits::storing(int slot, int64_t last, const Decoder::Take& take) {
  return [this, slot, last, &take](int64_t position, const Tensor& logits) {
    if (position + logits.size(0) - 1 == last) store(slot, logits);
    if (take) take(position, logits);
  };
}

SlotSampled HostLogits::sample(const SlotSample& sample) {
  Row& kept = rows_[size_t(sample.slot)];
  return sample_row(Tensor(kept.bytes.data(), kept.dtype, {int64_t(kept.bytes.size()) / size_of(kept.dtype)}), sample);
}

}  // namespace ingot
