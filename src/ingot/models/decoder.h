#pragma once
// The interface of a model for generation: slots, each a sequence of tokens with its keys and values, that grow, are
// truncated and are sampled from. Chat, generate, eval, benchmarks and servers use models through this interface alone.
//
// A slot holds length() tokens. After these tokens a slot has one of three things:
//   logits           of the token after its last one. extend() leaves logits; the next sample() uses them up.
//   a pending token  the last sampled token, not yet fed to the model. The next sample() feeds it first.
//   nothing          after open(), rewind(), a sample() that a stop id ended, or an error. sample() refuses; extend()
//                    continues.
// extend() and rewind() drop a pending token. To feed this token to the model, pass it to extend().
//
// The results of a slot depend only on its own tokens and options, not on other slots. On the CPU this holds bit for
// bit. An engine that computes several slots at once states in its documentation how far this holds.
// One thread at a time uses a decoder. cancel() alone may come from any thread, and from a signal handler.
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ingot/core/tensor.h"
#include "ingot/kernels/sampling/sampling.h"

namespace ingot {

// Why sampling ended: a stop id was sampled; the requested number of tokens; the context is full; cancel() was called.
enum class Finish { stop, length, context, cancelled };
const char* name_of(Finish f);

struct TokenLogprob {
  int32_t id = -1;
  double logprob = 0;  // natural logarithm
};
struct LogitBias {
  int32_t id = -1;
  float bias = 0;  // added to the logit; -infinity forbids the token
};

// The biases and the mask for the token after a draft token, in place of SampleOptions::bias and
// SampleOptions::allowed.
struct DraftRow {
  std::span<const LogitBias> bias;
  std::span<const uint32_t> allowed;
};

// How to sample. Spans must stay valid during the call. For every token, in this order:
//   logits of ids below `vocab`;  + bias;  -infinity where `allowed` lacks the id;  then `sampling` (kernels/sampling),
// with the noise of each id as a function of (seed, step + i, id) for the i-th token of the call
// (kernels/sampling/noise.h).
struct SampleOptions {
  SamplingOptions sampling;
  uint64_t seed = 1;
  uint32_t step = 0;  // tokens of this answer sampled before
  int64_t vocab = 0;  // ids from here on are never sampled: a tokenizer may have fewer than the model. 0: all may be
  std::span<const LogitBias> bias;  // several entries of an id are added up
  // Bit id % 32 of word id / 32: whether the id may be sampled. (vocab + 31) / 32 words, or empty: all ids. The mask
  // holds for every token of the call; to change the mask with each token, sample one token per call. A mask without
  // ids is an error.
  std::span<const uint32_t> allowed;
  std::span<const int32_t> stop_ids;  // a sampled stop id ends the call and is not among the tokens
  // -1: no logprobs. Else the logprobs of each sampled token and of this number of likeliest tokens are computed, by
  // the softmax of the model's logits of ids below `vocab`, before bias, `allowed`, temperature and filters.
  int64_t logprobs = -1;
  // Called with each token right after its sampling, on sample()'s thread. False ends the call with this token.
  std::function<bool(int32_t)> on_token;
  // Says that a call for the following token, with the same options, will probably come next, so that an engine may
  // begin to compute that token early. The sampled tokens do not depend on this field.
  bool goes_on = false;
  // Draft steps, for an engine with draft_rows() > 1. A call with `drafting` takes one step: the engine computes the
  // pending token and `draft`, which are guesses of the next tokens, in one pass over its weights. Then tokens are
  // sampled one after another, as long as each equals its draft token: at least one, at most draft.size() + 1. They are
  // the same tokens that calls with an empty `draft` would sample, whatever the draft is. Draft tokens beyond
  // draft_rows() - 1, n - 1 or the context are ignored; all draft tokens are ignored if the slot has no pending token.
  // All calls of an answer should have the same `drafting`, because an engine may round differently in draft steps and
  // in other steps.
  bool drafting = false;
  std::span<const int32_t> draft;
  std::span<const DraftRow> draft_rows;  // one for each token of `draft`, or empty: bias and allowed hold for all
};

struct TokenLogprobs {
  union {
    double sampled = 0;  // of the sampled token
    double drawn;        // the earlier name, for one version
  };
  std::vector<TokenLogprob> top;  // likeliest first, lower ids first among equals; may include the sampled token
};
// A sampled token.
struct SampledToken {
  int32_t token = -1;
  TokenLogprobs logprobs;  // where asked for
};
// After the call the slot holds its earlier tokens, the previously pending token, and the tokens of this result. The
// last sampled token is not yet fed to the model, unless a stop id ended the call. Without a sampled token the slot is
// unchanged.
struct Sampled {
  std::vector<int32_t> tokens;
  std::vector<TokenLogprobs> logprobs;  // an entry per token, if requested
  Finish finish = Finish::length;
  int32_t stop_id = -1;               // the id that ended the call
  int64_t drafted = 0, accepted = 0;  // draft tokens that the step computed; draft tokens that became `tokens`
  std::exception_ptr error;           // of a request among several; the tokens sampled before the error are here
};

// The earlier names, for one version.
using DrawOptions = SampleOptions;
using Drawn = Sampled;
using DrawnToken = SampledToken;

// A request of the loop of sample() to an engine: the next token of a slot, after `step` sampled tokens of the answer.
struct SlotSample {
  int slot = 0;
  const SampleOptions* options = nullptr;
  uint32_t step = 0;
  bool goes_on = false;  // unless this token ends the answer, the next token will be sampled with the same options
};
struct SlotSampled {
  SampledToken token;
  std::exception_ptr error;  // of this slot alone
};
// A pending token to feed to the model, and how the token after it will be sampled.
struct PendingToken {
  int32_t id = -1;
  SlotSample next;
};
// A draft step of a slot: the pending token and its draft, and how the token after each of these is sampled.
struct DraftStep {
  std::span<const int32_t> ids;
  std::span<const SlotSample> samples;  // samples[i]: of the token after ids[i]
};

// Clients call the public functions. An engine derives from one of two classes, which differ in where a token is
// sampled: HostDecoder (host_decoder.h) from logits that the engine hands to the host, DeviceDecoder (device_decoder.h)
// on the engine's device. The loop over the tokens of an answer, batches of slots, cancellation, stop ids and errors
// are functions of this class (sample_loop.cpp). On the host, only the engine's cache stores the length of a slot;
// cached_length() returns this length.
class Decoder {
 public:
  enum class Rows { last, all };
  // The logits (n, V) f32 or f64, in host memory, of n tokens, the first at `position`; valid during the call.
  using Take = std::function<void(int64_t position, const Tensor& logits)>;

  explicit Decoder(int64_t slots);
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;
  virtual ~Decoder() = default;

  virtual int64_t vocab() const = 0;
  virtual int64_t context() const = 0;                       // most tokens of a slot
  virtual int64_t batch() const = 0;                         // most tokens of an extend()
  virtual int64_t columns() const { return 1; }              // slots per pass over the weights
  virtual int64_t draft_rows() const { return 1; }           // tokens of a draft step, the pending one included
  virtual Device device() const { return {}; }               // the device of the computation
  int64_t slots() const { return int64_t(states_.size()); }  // the most open slots
  int64_t open_slots() const;

  // Opens an empty slot, with the lowest free number. Error{busy} when all are open. A closed slot's number is used
  // again, without a trace of the old contents.
  int open();
  void close(int slot);
  int64_t length(int slot) const;

  // Appends 1 to batch() tokens. `take`, if given, receives the logits of the last token or of all tokens in order, in
  // one or more calls. Returns false if cancelled; the slot then holds its earlier tokens, without logits. More tokens
  // than the context has room for are Error{usage} and change nothing.
  bool extend(int slot, std::span<const int32_t> ids, Rows rows = Rows::last, const Take& take = {});
  // Appends tokens to several slots, each at most once, of batch() tokens in all, and leaves the logits of each slot's
  // last token. Where the engine extends_together() the slots share one pass over its weights. The result has an entry
  // per part: false, as for extend(). After an Error the slots have neither logits nor a pending token.
  struct Part {
    int slot = -1;
    std::span<const int32_t> ids;
  };
  std::vector<bool> extend(std::span<const Part> parts);
  virtual bool extends_together() const { return false; }
  // Gives `to` the first `length` tokens of `from` with their keys and values, in place of the contents of `to`.
  // Returns `length`; or 0, without a change, where the engine cannot copy or `from` lacks keys of these tokens.
  // Checkpoints of `to` are dropped.
  int64_t copy_prefix(int from, int to, int64_t length);
  // Drops the tokens after the first `length`, or more tokens if the engine cannot return to this length. Returns the
  // number of remaining tokens.
  int64_t rewind(int slot, int64_t length);
  // Announces that the slot may later be truncated to its present length. The cost and the largest number of such
  // checkpoints depend on the decoder. close() drops all checkpoints.
  void checkpoint(int slot);
  void mark(int slot) { checkpoint(slot); }  // the earlier name, for one version

  // Samples 1 to n tokens, n >= 1. If the context becomes full there are fewer tokens, the result is Finish::context,
  // and the last token is pending (a pending token needs no place in the slot). A wrong option is an Error before
  // anything changes. An Error during the sampling (numeric) leaves the slot without logits and without a pending
  // token.
  Sampled sample(int slot, const SampleOptions& options, int64_t n);
  // Samples for several slots, each at most once, so that an engine may compute up to columns() slots together. An
  // error of a slot is in its result and does not affect the other slots.
  struct Request {
    int slot = -1;
    SampleOptions options;
    int64_t n = 1;
  };
  std::vector<Sampled> sample(std::span<const Request> requests);
  // The earlier name, for one version.
  Sampled draw(int slot, const SampleOptions& options, int64_t n) { return sample(slot, options, n); }
  std::vector<Sampled> draw(std::span<const Request> requests) { return sample(requests); }

  // Returns up to `most` guesses of the tokens after the slot's pending token, made by the engine's draft head
  // (models/draft/head). There are no guesses without a head, without a pending token, or if the context has no room
  // for them. Later results of the slot do not depend on this call.
  virtual bool has_draft_head() const { return false; }
  std::vector<int32_t> guess(int slot, int64_t most);

  // A trace of the next token's time for ui.perfetto.dev, for an engine that traces(). The token is computed twice and
  // not appended; logits of extend() are lost. A full context is Error{usage}.
  virtual bool traces() const { return false; }
  std::string trace(int slot);

  // Ends the slot's running extend() or sample(), or if none runs the next such call, at the next token or batch. The
  // ended call clears the request to cancel; so do open() and close().
  void cancel(int slot) noexcept;

 protected:
  // The engine's functions. The slot is open, and arguments are checked.
  virtual void clear(int slot) = 0;  // an empty sequence without checkpoints
  virtual int64_t cached_length(int slot) const = 0;
  virtual int64_t truncate(int slot, int64_t length) = 0;  // as rewind()
  virtual void save_checkpoint(int) {}
  virtual bool copy_tokens(int /*from*/, int /*to*/, int64_t /*length*/) { return false; }  // false: nothing changed
  virtual std::string trace_token(int) { return {}; }
  // Appends tokens and keeps the last token's logits for sample_tokens().
  virtual void append(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) = 0;
  // The same for at least two parts, where the engine extends_together().
  virtual void append_together(std::span<const Part>) {}
  // Appends a pending token and keeps its logits.
  virtual void feed(const PendingToken& pending) = 0;
  // The same for 2 to columns() slots. False, with nothing appended: the tokens are fed one by one.
  virtual bool feed_together(std::span<const PendingToken>) { return false; }
  // Draft steps of different slots with draft_rows() ids in all, of an engine with draft_rows() > 1: appends the ids of
  // each step and samples the tokens after them. The logits after an id depend neither on the number of ids, nor on
  // later ids, nor on other steps, bit for bit. The tokens of a step may end with the first token that differs from the
  // draft, or with an error.
  virtual std::vector<std::vector<SlotSampled>> sample_drafts(std::span<const DraftStep>) { return {}; }
  // guess() after the pending token, of an engine that has_draft_head().
  virtual std::vector<int32_t> guess_after(int /*slot*/, int32_t /*pending*/, int64_t /*most*/) { return {}; }
  // Samples the next token of each of several slots from the kept logits, with logprobs where the options ask for them.
  virtual std::vector<SlotSampled> sample_tokens(std::span<const SlotSample> samples) = 0;
  int64_t vocab_of(const SampleOptions& o) const { return o.vocab > 0 ? o.vocab : vocab(); }

 private:
  enum class Next { nothing, logits, pending };  // the state of a slot after its tokens
  struct State {
    bool open = false;
    Next next = Next::nothing;
    int32_t pending = -1;
    std::atomic<bool> cancel = false;
  };
  struct Answer;
  State& state(int slot);
  void check_extend(int slot, std::span<const int32_t> ids);
  // Whether cancel() was called for the slot; clears the request.
  bool take_cancel(int slot) { return states_[size_t(slot)].cancel.exchange(false, std::memory_order_relaxed); }
  void check_sample(int slot, const SampleOptions& o, int64_t n);
  void check_token_choice(std::span<const LogitBias> bias, std::span<const uint32_t> allowed, int64_t ids) const;
  bool continues(Answer& answer);
  void feed_all(std::span<Answer* const> answers);
  void sample_next(std::span<Answer* const> answers);
  void sample_drafts_of(std::span<Answer* const> answers);
  void take_draft(Answer& answer, std::span<const int32_t> ids, int64_t begin, std::vector<SlotSampled> sampled);
  void sample_all(std::span<Answer> answers);
  void update_state(const Answer& answer);
  std::vector<State> states_;
};

// A slot of a decoder, open during this object's lifetime.
class Sequence {
 public:
  explicit Sequence(Decoder& decoder) : decoder_(&decoder), slot_(decoder.open()) {}
  Sequence(Sequence&& o) noexcept : decoder_(o.decoder_), slot_(std::exchange(o.slot_, -1)) {}
  Sequence& operator=(Sequence&&) = delete;
  ~Sequence() {
    if (slot_ >= 0) decoder_->close(slot_);
  }
  Decoder& decoder() const { return *decoder_; }
  int slot() const { return slot_; }
  int64_t length() const { return decoder_->length(slot_); }
  bool extend(std::span<const int32_t> ids, Decoder::Rows rows = Decoder::Rows::last, const Decoder::Take& take = {}) {
    return decoder_->extend(slot_, ids, rows, take);
  }
  int64_t rewind(int64_t length) { return decoder_->rewind(slot_, length); }
  void checkpoint() { decoder_->checkpoint(slot_); }
  void mark() { checkpoint(); }  // the earlier name
  Sampled sample(const SampleOptions& options, int64_t n) { return decoder_->sample(slot_, options, n); }
  Sampled draw(const SampleOptions& options, int64_t n) { return sample(options, n); }  // the earlier name
  void cancel() noexcept { decoder_->cancel(slot_); }

 private:
  Decoder* decoder_;
  int slot_;
};

}  // namespace ingot
