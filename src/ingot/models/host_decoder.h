#pragma once
// The base class of engines that hand logits to the host, where the tokens are sampled.
#include "ingot/models/decoder.h"
#include "ingot/models/host_sampling.h"

namespace ingot {

class HostDecoder : public Decoder {
 public:
  explicit HostDecoder(int64_t slots) : Decoder(slots), logits_(slots) {}

 protected:
  // Appends 1 to batch() tokens and passes the logits of the last token or of all tokens to `take`.
  virtual void extend_slot(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) = 0;
  // Appends 1 to draft_rows() tokens and passes the logits of all of them to `take`. The logits of each token have the
  // same bits as those of extend_slot() for this token alone, after the tokens before it. Called only if draft_rows()
  // is more than 1.
  virtual void extend_draft(int /*slot*/, std::span<const int32_t> /*ids*/, const Take&) {}

 private:
  void append(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) final;
  void feed(const PendingToken& pending) final;
  std::vector<std::vector<SlotSampled>> sample_drafts(std::span<const DraftStep> steps) final;
  std::vector<SlotSampled> sample_tokens(std::span<const SlotSample> samples) final;
  HostLogits logits_;
};

}  // namespace ingot
