#include "ingot/models/host_decoder.h"

namespace ingot {

void HostDecoder::append(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) {
  extend_slot(slot, ids, rows, logits_.storing(slot, cached_length(slot) + int64_t(ids.size()) - 1, take));
}

void HostDecoder::feed(const PendingToken& p) { append(p.next.slot, {&p.id, 1}, Rows::last, {}); }

std::vector<std::vector<SlotSampled>> HostDecoder::sample_drafts(std::span<const DraftStep> steps) {
  std::vector<std::vector<SlotSampled>> all;
  for (const DraftStep& step : steps) {
    std::vector<SlotSampled>& sampled = all.emplace_back();
    try {
      extend_draft(step.samples[0].slot, step.ids, [&](int64_t, const Tensor& logits) {
        for (int64_t row = 0; row < logits.size(0); ++row) {
          const size_t i = sampled.size();
          // The rows after a token that differs from the draft belong to no answer.
          if (i > 0 && (sampled[i - 1].error || sampled[i - 1].token.token != step.ids[i])) return;
          sampled.push_back(sample_row(logits.row(row), step.samples[i]));
        }
      });
    } catch (...) { sampled.push_back({.token = {}, .error = std::current_exception()}); }
  }
  return all;
}

std::vector<SlotSampled> HostDecoder::sample_tokens(std::span<const SlotSample> samples) {
  std::vector<SlotSampled> sampled;
  for (const SlotSample& s : samples) sampled.push_back(logits_.sample(s));
  return sampled;
}

}  // namespace ingot
