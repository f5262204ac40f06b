#pragma once
// A decoder that brings each token's logits to the host and samples there. An engine computes logits; this class does
// the rest. An engine with its own sampling leaves the logits on its device.
#include "ingot/models/decoder.h"

namespace ingot {

// A token to sample for a slot, after `step` sampled tokens of the answer.
struct SlotSample {
  int slot = 0;
  const SampleOptions* options = nullptr;
  uint32_t step = 0;
  bool goes_on = false;  // unless this token ends the answer, the next token will be sampled with the same options
};
struct SlotSampled {
  SampledToken token;
  std::exception_ptr error;
};

class HostDecoder : public Decoder {
 public:
  explicit HostDecoder(int64_t slots) : Decoder(slots), rows_(size_t(slots)) {}

 protected:
  // Appends 1 to batch() tokens and passes the logits of the last token or of all tokens to `take`.
  virtual void extend_slot(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) = 0;
  // Appends a token and samples the next token from ids below `vocab`, like sample() with this seed and step, without
  // bias, `allowed` and logprobs. -1, with nothing appended: not supported by the engine. NaN among the logits is
  // Error{numeric}, as in sample().
  virtual int32_t drawn_after(int slot, int32_t token, int64_t vocab, const SamplingOptions& o, uint64_t seed,
                              uint32_t step) {
    return -1;
  }
  // For an engine that samples on its own device: appends tokens and leaves the last token's logits on the device.
  // False, with nothing appended: not supported. `next`: the options for the token after these, which the engine may
  // sample at once; null where not known yet. sample_on_device() then returns this token.
  virtual bool extend_there(int slot, std::span<const int32_t> ids, const SlotSample* next) { return false; }
  // Appends tokens to several slots, as extend_there() without `next`; where the engine extends_together().
  virtual void extend_parts_there(std::span<const Part>) {}
  // A token to each of 2 to columns() slots, as extend_there().
  virtual bool extend_together(std::span<const int> slots, std::span<const int32_t> ids, int64_t vocab) {
    return false;
  }
  // Whether the engine's device can sample with these options; otherwise bring_there() copies the logits to the host.
  virtual bool samples_on_device(const SampleOptions& o) const { return false; }
  // Like draw_from() and logprobs_of(), for each of several slots from the logits of extend_there(). An error of a slot
  // is in its result.
  virtual std::vector<SlotSampled> sample_on_device(std::span<const SlotSample> of) { return {}; }
  virtual void bring_there(int slot, const Take& take) {}

 private:
  bool append(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) final;
  void append_together(std::span<const Part> parts) final;
  Sampled sample_one(int slot, int32_t waiting, const SampleOptions& options, int64_t n) final;
  std::vector<Sampled> sample_all(std::span<const Request> requests, std::span<const int32_t> waiting) final;
  // The progress of sampling several tokens, one at a time.
  struct Progress {
    int slot;
    const SampleOptions& options;
    int64_t n;
    int32_t waiting;
    Sampled drawn;
    bool ended = false, told = false;  // told: the pending token was fed, and there are logits
    bool sampled = false;              // the next token was sampled together with further slots
  };
  bool goes_on(Progress& p);  // false: the answer has ended
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

// Samples from a row of logits according to SampleOptions: the reference for an engine's own sampling. `row` (V) is not
// changed. Nothing allowed is Error{invalid_argument}; NaN is Error{numeric}.
int32_t draw_from(const Tensor& row, const SampleOptions& options, uint32_t step);
TokenLogprobs logprobs_of(const Tensor& row, int64_t vocab, int32_t drawn, int64_t top);
// The log-probabilities from the output of logprobs() (kernels/sampling/logprobs.h).
TokenLogprobs logprobs_of(std::span<const int32_t> top, std::span<const double> values);
// The order for sample(): by id, and in the given order for equal ids.
std::vector<LogitBias> in_order(std::span<const LogitBias> bias);

}  // namespace ingot
