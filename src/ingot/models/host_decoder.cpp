#include "ingot/models/host_decoder.h"

namespace ingot {

void HostDecoder::append(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) {
  extend_slot(slot, ids, rows, logits_.storing(slot, cached_length(slot) + int64_t(ids.size()) - 1, take));
}

void HostDecoder::feed(const PendingToken& p) { append(p.next.slot, {&p.id, 1}, Rows::last, {}); }

std::vector<SlotSampled> HostDecoder::sample_tokens(std::span<const SlotSample> samples) {
  std::vector<SlotSampled> sampled;
  for (const SlotSample& s : samples) sampled.push_back(logits_.sample(s));
  return sampled;
}

}  // namespace ingot
