#pragma once
// A decoder that brings each token's logits to the host and draws there. An engine gives logits; this does the rest. An
// engine that draws itself leaves them where they are.
#include "ingot/models/decoder.h"

namespace ingot {

// A token to sample for a slot, `step` tokens of the answer having been sampled before it.
struct SlotSample {
  int slot = 0;
  const SampleOptions* options = nullptr;
  uint32_t step = 0;
  bool goes_on = false;  // unless this token ends the answer, the one after will be sampled with the same options
};
struct SlotSampled {
  SampledToken token;
  std::exception_ptr error;
};

class HostDecoder : public Decoder {
 public:
  explicit HostDecoder(int64_t slots) : Decoder(slots), rows_(size_t(slots)) {}

 protected:
  // Appends 1 to batch() tokens and gives `take` logits of the last one or of all.
  virtual void extend_slot(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) = 0;
  // Appends a token and draws the one after it from ids below `vocab`, as sample() would with this seed and step: where
  // there is no bias, no `allowed` and no wish for logprobs. -1, with nothing appended: the engine cannot. Logits that
  // are not numbers are Error{numeric}, as sample() has it.
  virtual int32_t drawn_after(int slot, int32_t token, int64_t vocab, const SamplingOptions& o, uint64_t seed,
                              uint32_t step) {
    return -1;
  }
  // An engine that draws on a device of its own, whatever is asked for, leaves the last token's logits there.
  // Appends tokens. False, with nothing appended: it cannot. `next`: how the token after these will be sampled, which
  // the engine may do at once; null where that is not known yet. sample_on_device() then asks for that token.
  virtual bool extend_there(int slot, std::span<const int32_t> ids, const SlotSample* next) { return false; }
  // Appends tokens to several slots, as extend_there() without `next`; where the engine extends_together().
  virtual void extend_parts_there(std::span<const Part>) {}
  // A token to each of 2 to columns() slots, as extend_there().
  virtual bool extend_together(std::span<const int> slots, std::span<const int32_t> ids, int64_t vocab) {
    return false;
  }
  // Whether the engine can sample on its device as these options ask; else bring_there() gives the logits to the host.
  virtual bool samples_on_device(const SampleOptions& o) const { return false; }
  // As draw_from() and logprobs_of(), for each of several slots from the logits that extend_there() left. An error of
  // one slot is in its result.
  virtual std::vector<SlotSampled> sample_on_device(std::span<const SlotSample> of) { return {}; }
  virtual void bring_there(int slot, const Take& take) {}

 private:
  bool append(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) final;
  void append_together(std::span<const Part> parts) final;
  Sampled sample_one(int slot, int32_t waiting, const SampleOptions& options, int64_t n) final;
  std::vector<Sampled> sample_all(std::span<const Request> requests, std::span<const int32_t> waiting) final;
  // A draw of several tokens, one at a time.
  struct Progress {
    int slot;
    const SampleOptions& options;
    int64_t n;
    int32_t waiting;
    Sampled drawn;
    bool ended = false, told = false;  // told: the token that waits was, and there are logits
    bool sampled = false;              // its next token, together with those of other slots
  };
  bool goes_on(Progress& p);  // else it has ended
  void tell_waiting(Progress& p);
  uint32_t step_of(const Progress& p) const { return p.options.step + uint32_t(p.drawn.tokens.size()); }
  void sample_next(Progress& p);
  void take(Progress& p, SampledToken sampled);
  void sample_together(std::span<Progress*> of);
  void tell_together(std::span<Progress*> of);
  void tell(int slot, std::span<const int32_t> ids, Rows rows, const Take& take);
  Tensor row(int slot);  // (V): the last token's logits
  void keep_last(int slot, const Tensor& logits);
  SampledToken token_from(int slot, const SampleOptions& o, uint32_t step, bool goes_on);
  int64_t drawable(const SampleOptions& o) const { return o.vocab > 0 ? o.vocab : vocab(); }
  struct Row {
    std::vector<char> bytes;
    DType dtype = DType::f32;
    bool is_there = false;  // on the engine's device, and not here
  };
  std::vector<Row> rows_;  // by slot: the last token's logits
};

// One row of logits as SampleOptions says: what an engine's own sampling is compared with. `row` (V) is left as it is.
// Nothing allowed is Error{invalid_argument}; NaN is Error{numeric}.
int32_t draw_from(const Tensor& row, const SampleOptions& options, uint32_t step);
TokenLogprobs logprobs_of(const Tensor& row, int64_t vocab, int32_t drawn, int64_t top);
// What logprobs() (kernels/sampling/logprobs.h) left.
TokenLogprobs logprobs_of(std::span<const int32_t> top, std::span<const double> values);
// As sample() takes them: by id, of one id in the order that is given.
std::vector<LogitBias> in_order(std::span<const LogitBias> bias);

}  // namespace ingot
