#pragma once
// The base class of engines that sample on their own device. The logits stay on the device, and are copied to the host
// only for options with which the device does not sample, and where the caller asks for them.
#include "ingot/models/decoder.h"
#include "ingot/models/host_sampling.h"

namespace ingot {

class DeviceDecoder : public Decoder {
 public:
  explicit DeviceDecoder(int64_t slots) : Decoder(slots), host_logits_(slots) {}

 protected:
  // Appends 1 to batch() tokens and passes the logits of the last token or of all tokens, in host memory, to `take`.
  virtual void extend_slot(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) = 0;
  // Appends tokens and leaves the last token's logits on the device. `next`: how the token after these will be sampled;
  // the engine may sample this token at once, and sample_on_device() then returns it. Null where not known yet.
  virtual void extend_on_device(int slot, std::span<const int32_t> ids, const SlotSample* next) = 0;
  // The same without `next` for several slots, where the engine extends_together().
  virtual void extend_parts_on_device(std::span<const Part>) {}
  // Appends a pending token to each of 2 to columns() slots. False, with nothing appended: the tokens are fed one by
  // one.
  virtual bool feed_on_device(std::span<const PendingToken>) { return false; }
  // Whether the device can sample this token; otherwise the host samples from copy_logits_to_host().
  virtual bool samples_on_device(const SlotSample& sample) const = 0;
  // Samples a token of each slot like sample_from() and logprobs_of() (host_sampling.h). An error of one slot is in the
  // slot's result.
  virtual std::vector<SlotSampled> sample_on_device(std::span<const SlotSample> samples) = 0;
  // As sample_drafts(), for all options.
  virtual std::vector<std::vector<SlotSampled>> sample_drafts_on_device(std::span<const DraftStep>) { return {}; }
  virtual void copy_logits_to_host(int slot, const Take& take) = 0;  // of the last token

 private:
  void append(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) final;
  void append_together(std::span<const Part> parts) final;
  void feed(const PendingToken& pending) final;
  bool feed_together(std::span<const PendingToken> pending) final;
  std::vector<std::vector<SlotSampled>> sample_drafts(std::span<const DraftStep> steps) final;
  std::vector<SlotSampled> sample_tokens(std::span<const SlotSample> samples) final;
  SlotSampled sample_on_host(const SlotSample& sample);
  HostLogits host_logits_;  // only for slots whose last logits were copied to the host
};

}  // namespace ingot
