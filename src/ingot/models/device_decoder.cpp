#include "ingot/models/device_decoder.h"

namespace ingot {

void DeviceDecoder::append(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) {
  host_logits_.erase(slot);
  if (rows == Rows::last && !take) return extend_on_device(slot, ids, nullptr);
  extend_slot(slot, ids, rows, host_logits_.storing(slot, cached_length(slot) + int64_t(ids.size()) - 1, take));
}

void DeviceDecoder::append_together(std::span<const Part> parts) {
  for (const Part& part : parts) host_logits_.erase(part.slot);
  extend_parts_on_device(parts);
}

void DeviceDecoder::feed(const PendingToken& p) {
  host_logits_.erase(p.next.slot);
  extend_on_device(p.next.slot, {&p.id, 1}, &p.next);
}

bool DeviceDecoder::feed_together(std::span<const PendingToken> pending) {
  if (!feed_on_device(pending)) return false;
  for (const PendingToken& p : pending) host_logits_.erase(p.next.slot);
  return true;
}

std::vector<std::vector<SlotSampled>> DeviceDecoder::sample_drafts(std::span<const DraftStep> steps) {
  for (const DraftStep& step : steps) host_logits_.erase(step.samples[0].slot);
  return sample_drafts_on_device(steps);
}

SlotSampled DeviceDecoder::sample_on_host(const SlotSample& sample) {
  try {
    if (!host_logits_.has(sample.slot))
      copy_logits_to_host(sample.slot, [&](int64_t, const Tensor& logits) { host_logits_.store(sample.slot, logits); });
  } catch (...) { return {.token = {}, .error = std::current_exception()}; }
  return host_logits_.sample(sample);
}

std::vector<SlotSampled> DeviceDecoder::sample_tokens(std::span<const SlotSample> samples) {
  std::vector<SlotSampled> sampled(samples.size());
  std::vector<SlotSample> on_device;
  std::vector<size_t> places;  // of these among the results
  for (size_t i = 0; i < samples.size(); ++i)
    if (!host_logits_.has(samples[i].slot) && samples_on_device(samples[i]))
      on_device.push_back(samples[i]), places.push_back(i);
  if (!on_device.empty()) try {
      std::vector<SlotSampled> found = sample_on_device(on_device);
      for (size_t i = 0; i < found.size(); ++i) sampled[places[i]] = std::move(found[i]);
    } catch (...) {
      for (const size_t i : places) sampled[i].error = std::current_exception();
    }
  for (size_t i = 0, next = 0; i < samples.size(); ++i)
    if (next < places.size() && places[next] == i)
      ++next;
    else
      sampled[i] = sample_on_host(samples[i]);
  return sampled;
}

}  // namespace ingot
