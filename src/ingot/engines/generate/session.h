#pragma once
// Generation over a decoder: prompt, then a token at a time until something ends it. What the decoder already holds of
// the next prompt is used again.
#include "ingot/engines/generate/decoder.h"
#include "ingot/kernels/sampling/sampling.h"

namespace ingot {

enum class Finish { stop, length, context, cancelled };  // a stop id; enough tokens; the context is full; asked to end
const char* name_of(Finish f);

struct SessionOptions {
  int64_t tokens = 200;  // most new ones
  SamplingOptions sampling;
  uint64_t seed = 1;
  int64_t vocab = 0;  // ids from here on are never drawn: a tokenizer may have fewer than the model. 0: all may be
  std::vector<int32_t> stop_ids;
  // Where the context is full: end, or go on with its newest half (a longer prompt then loses its beginning).
  bool slide = false;
  std::function<bool(int32_t)> on_token;  // each new token as it is drawn, not the stop id; false ends the answer
  std::function<bool()> cancelled;        // asked between batches of the prompt and before each token
  std::function<void(int64_t, int64_t)> on_prompt;  // tokens of the prompt that are done, and all of them
};
struct Answer {
  std::vector<int32_t> tokens;  // without the stop id
  Finish finish = Finish::length;
  int32_t stop_id = -1;                          // the one that ended it
  int64_t prompt = 0, reused = 0;                // tokens of the prompt; those whose keys and values were there already
  double prompt_seconds = 0, token_seconds = 0;  // until the first logits; after them
};

class Session {
 public:
  explicit Session(Decoder& decoder) : decoder_(decoder) {}
  // An error leaves the session as if everything had been forgotten.
  Answer generate(std::span<const int32_t> prompt, const SessionOptions& options);
  void forget();                                              // the next prompt is computed whole
  const std::vector<int32_t>& told() const { return told_; }  // what the decoder holds

 private:
  bool tell(std::span<const int32_t> ids, const SessionOptions& o, const Decoder::Take& take);
  Decoder& decoder_;
  std::vector<int32_t> told_;
};

}  // namespace ingot
