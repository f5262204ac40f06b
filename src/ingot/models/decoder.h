#pragma once
// A model as generation sees it: slots, each a sequence of tokens with its keys and values, that grow, are cut back and
// are sampled from. Chat, generate, eval, benchmarks and servers know models by this alone.
//
// A slot holds length() tokens. Beyond them it has one of three things:
//   logits    of the token after its last one. extend() leaves them; the next sample() uses them up.
//   a waiting token: the last one sampled, which the model has not been told yet. The next sample() tells it first.
//   nothing   after open(), rewind(), a sample() that a stop id ended, or an error. sample() refuses; extend() goes on.
// extend() and rewind() forget a waiting token: who wants it told names it.
//
// What a slot gives depends on its own tokens and options alone, never on what other slots do. On the CPU that holds
// bit for bit; an engine that computes several slots at once says what it promises.
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

// Why sampling ended: a stop id was sampled; as many tokens as were asked for; the context is full; it was asked to.
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

// How to sample. Spans must stay valid during the call. For every token, in this order:
//   logits of ids below `vocab`;  + bias;  -infinity where `allowed` lacks the id;  then `sampling` (kernels/sampling),
// which takes the random number Rng(seed, Purpose::sampling, step + i).uniform(0) for the i-th token of the call.
struct SampleOptions {
  SamplingOptions sampling;
  uint64_t seed = 1;
  uint32_t step = 0;  // tokens of this answer sampled before
  int64_t vocab = 0;  // ids from here on are never sampled: a tokenizer may have fewer than the model. 0: all may be
  std::span<const LogitBias> bias;  // of one id several times: added up
  // Bit id % 32 of word id / 32: may be sampled. (vocab + 31) / 32 words, or empty: all may. It holds for every token
  // of the call; who changes it with each token asks for one at a time. Nothing allowed is an error.
  std::span<const uint32_t> allowed;
  std::span<const int32_t> stop_ids;  // sampling one of them ends the call; it is not among the tokens
  // -1: no logprobs. Else of each token and of the so many likeliest, under softmax of the model's logits of ids below
  // `vocab`: before bias, `allowed`, temperature and filters.
  int64_t logprobs = -1;
  // Called with each token as it is sampled, on the thread that called sample(). False ends the call with that token.
  std::function<bool(int32_t)> on_token;
};

struct TokenLogprobs {
  double drawn = 0;               // of the sampled token
  std::vector<TokenLogprob> top;  // likeliest first, of equal ones the lower id; may hold the token that was sampled
};
// One sampled token.
struct SampledToken {
  int32_t token = -1;
  TokenLogprobs logprobs;  // where asked for
};
// The slot holds what it held, the token that waited, and the tokens given here: all of them where a stop id ended the
// call, else all but the last, which waits. Where no token was sampled, what there was is there still.
struct Sampled {
  std::vector<int32_t> tokens;
  std::vector<TokenLogprobs> logprobs;  // one for each token, where asked for
  Finish finish = Finish::length;
  int32_t stop_id = -1;      // the one that ended it
  std::exception_ptr error;  // of a request among several; what was sampled before it is here
};

// The earlier names, for one version.
using DrawOptions = SampleOptions;
using Drawn = Sampled;
using DrawnToken = SampledToken;

class Decoder {
 public:
  enum class Rows { last, all };
  // The logits (n, V) f32 or f64, in host memory, of n tokens, the first of them at `position`; valid during the call.
  using Take = std::function<void(int64_t position, const Tensor& logits)>;

  explicit Decoder(int64_t slots);
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;
  virtual ~Decoder() = default;

  virtual int64_t vocab() const = 0;
  virtual int64_t context() const = 0;                       // most tokens of a slot
  virtual int64_t batch() const = 0;                         // most tokens of one extend()
  virtual int64_t columns() const { return 1; }              // slots that one pass over the weights serves
  virtual Device device() const { return {}; }               // where it computes
  int64_t slots() const { return int64_t(states_.size()); }  // most that are open at once
  int64_t open_slots() const;

  // An empty slot, the lowest number that is free. None free is Error{busy}. A closed slot's number is used again, and
  // nothing of what it held is seen then.
  int open();
  void close(int slot);
  int64_t length(int slot) const;

  // Appends 1 to batch() tokens. `take`, where given, gets the last one's logits or those of all in order, in one or
  // more calls. False: cancelled, and the slot holds what it held before, with nothing beyond. More than the context
  // has room for is Error{usage} and changes nothing.
  bool extend(int slot, std::span<const int32_t> ids, Rows rows = Rows::last, const Take& take = {});
  // Appends tokens to several slots, each at most once, of batch() tokens in all, and leaves the logits of each slot's
  // last token. Where the engine extends_together() the slots share one pass over its weights. By part: false as
  // extend() has it. After an Error no slot has anything beyond its tokens.
  struct Part {
    int slot = -1;
    std::span<const int32_t> ids;
  };
  std::vector<bool> extend(std::span<const Part> parts);
  virtual bool extends_together() const { return false; }
  // Gives `to` the first `length` tokens of `from` with their keys and values, in place of what `to` holds. Returns
  // `length`; or 0, and nothing changes, where the engine cannot copy or `from` does not hold all that those tokens
  // need. Places that mark() kept in `to` are dropped.
  int64_t copy_prefix(int from, int to, int64_t length);
  // Forgets the tokens after the first `length`, and more where it must. Returns how many are left.
  int64_t rewind(int slot, int64_t length);
  // Says that the slot may be cut back to its present length later. What that costs, and how many such places are kept,
  // is the decoder's affair; close() drops them.
  void mark(int slot);

  // Samples 1 to n tokens, n >= 1. Full context: fewer, with Finish::context, the last one waiting (it is known without
  // being told). A wrong option is an Error before anything changes; an Error on the way (numeric) leaves the slot with
  // nothing beyond its tokens.
  Sampled sample(int slot, const SampleOptions& options, int64_t n);
  // Several slots, each at most once, so that an engine may compute up to columns() of them together. An error of one
  // is in its result and leaves the others alone.
  struct Request {
    int slot = -1;
    SampleOptions options;
    int64_t n = 1;
  };
  std::vector<Sampled> sample(std::span<const Request> requests);
  // The earlier name, for one version.
  Sampled draw(int slot, const SampleOptions& options, int64_t n) { return sample(slot, options, n); }
  std::vector<Sampled> draw(std::span<const Request> requests) { return sample(requests); }

  // Where the time of a token after the slot's goes, for ui.perfetto.dev: of an engine that traces(). It is computed,
  // twice, and not appended; logits of extend() are gone. A full context is Error{usage}.
  virtual bool traces() const { return false; }
  std::string trace(int slot);

  // Ends the slot's extend() or sample() that is under way, or else the next one, at the next token or batch. That call
  // uses the wish up; so do open() and close().
  void cancel(int slot) noexcept;

 protected:
  // What an engine gives. The slot is open, arguments are checked, `cancelled(slot)` has not been asked yet.
  virtual void start(int slot) = 0;  // an empty sequence, without the places mark() kept
  virtual int64_t held(int slot) const = 0;
  virtual bool append(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) = 0;
  virtual int64_t cut(int slot, int64_t length) = 0;
  // Of at least two parts, where the engine extends_together().
  virtual void append_together(std::span<const Part>) {}
  // False: nothing has changed.
  virtual bool copy_tokens(int, int, int64_t) { return false; }
  virtual void keep(int) {}
  // There are logits or a waiting token (`waiting` >= 0). Gives what sample() does; on_token may be empty.
  virtual Sampled sample_one(int slot, int32_t waiting, const SampleOptions& options, int64_t n) = 0;
  virtual std::string trace_of(int) { return {}; }
  // One after the other, unless the engine can do better. Errors go into the results.
  virtual std::vector<Sampled> sample_all(std::span<const Request> requests, std::span<const int32_t> waiting);
  // Whether somebody asked to end what the slot does; the wish is used up.
  bool cancelled(int slot) { return states_[size_t(slot)].cancel.exchange(false, std::memory_order_relaxed); }

 private:
  void check_extend(int slot, std::span<const int32_t> ids);
  enum class Beyond { nothing, logits, waiting };
  struct State {
    bool open = false;
    Beyond beyond = Beyond::nothing;
    int32_t waiting = -1;
    std::atomic<bool> cancel = false;
  };
  State& state(int slot);
  void check_sample(int slot, const SampleOptions& o, int64_t n);
  void settle(int slot, const Sampled& d);
  std::vector<State> states_;
};

// One slot of a decoder, open for as long as this lives.
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
  void mark() { decoder_->mark(slot_); }
  Sampled sample(const SampleOptions& options, int64_t n) { return decoder_->sample(slot_, options, n); }
  Sampled draw(const SampleOptions& options, int64_t n) { return sample(options, n); }  // the earlier name
  void cancel() noexcept { decoder_->cancel(slot_); }

 private:
  Decoder* decoder_;
  int slot_;
};

}  // namespace ingot
