#pragma once
// Sampling from logits in host memory: the reference for an engine's own sampling.
#include "ingot/models/decoder.h"

namespace ingot {

// Samples from a row of logits according to SampleOptions. `row` (V) is not changed. Error{invalid_argument} if no id
// is allowed, Error{numeric} for NaN.
int32_t sample_from(const Tensor& row, const SampleOptions& options, uint32_t step);
// The earlier name, for one version.
inline int32_t draw_from(const Tensor& row, const SampleOptions& options, uint32_t step) {
  return sample_from(row, options, step);
}
TokenLogprobs logprobs_of(const Tensor& row, int64_t vocab, int32_t sampled, int64_t top);
// The log-probabilities from the output of logprobs() (kernels/sampling/logprobs.h).
TokenLogprobs logprobs_of(std::span<const int32_t> top, std::span<const double> values);
// Computes the token and its logprobs by these two functions. An error of theirs is in the result.
SlotSampled sample_row(const Tensor& row, const SlotSample& sample);
// The order for sample(): by id, and in the given order for equal ids.
std::vector<LogitBias> in_order(std::span<const LogitBias> bias);

// The logits of each slot's last token, as copies in host memory.
class HostLogits {
 public:
  explicit HostLogits(int64_t slots) : rows_(size_t(slots)) {}
  void store(int slot, const Tensor& logits);  // the last row of (n, V)
  void erase(int slot) { rows_[size_t(slot)].bytes.clear(); }
  bool has(int slot) const { return !rows_[size_t(slot)].bytes.empty(); }
  // Stores the logits of the token at `last` on the way to `take`, which may be empty.
  Decoder::Take storing(int slot, int64_t last, const Decoder::Take& take);
  SlotSampled sample(const SlotSample& sample);

 private:
  struct Row {
    std::vector<char> bytes;
    DType dtype = DType::f32;
  };
  std::vector<Row> rows_;
};

}  // namespace ingot
