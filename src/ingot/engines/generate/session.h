#pragma once
// Generation in one slot of a decoder: the prompt, then sampled tokens until the answer ends. The part of the next
// prompt already in the slot is reused.
#include <optional>

#include "ingot/models/decoder.h"
#include "ingot/models/draft/answer_drafts.h"

namespace ingot {

struct SessionOptions {
  int64_t tokens = 200;  // most new tokens
  SamplingOptions sampling;
  uint64_t seed = 1;
  int64_t vocab = 0;  // ids from here on are never sampled, as a tokenizer may have fewer ids than the model; 0: all
  std::vector<int32_t> stop_ids;
  std::vector<LogitBias> bias;  // models/decoder.h
  int64_t logprobs = -1;        // models/decoder.h
  // When the context is full, the answer ends, or with `slide` continues with the newest half of the context (a longer
  // prompt then loses its beginning).
  bool slide = false;
  draft::Options draft;                   // without a drafter: no drafts. Needs a decoder with draft_rows() > 1
  std::function<bool(int32_t)> on_token;  // each new token but the stop id; false ends the answer
  std::function<bool()> cancelled;        // called between batches of the prompt and before each token
  std::function<void(int64_t, int64_t)> on_prompt;  // tokens of the prompt already computed, and their total
};
struct Answer {
  std::vector<int32_t> tokens;          // without the stop id
  std::vector<TokenLogprobs> logprobs;  // one entry per id, if requested
  Finish finish = Finish::length;
  int32_t stop_id = -1;                          // the id that ended the answer
  int64_t prompt = 0, reused = 0;                // tokens of the prompt; the tokens with keys and values already in the
                                                 // slot
  double prompt_seconds = 0, token_seconds = 0;  // time until the first logits, time after the first logits
  draft::Counts drafts;
};

class Session {
 public:
  explicit Session(Decoder& decoder) : sequence_(decoder) {}
  // An error leaves the session as if everything had been forgotten.
  Answer generate(std::span<const int32_t> prompt, const SessionOptions& options);
  void forget();  // the next prompt is computed whole
  const Decoder& decoder() const { return sequence_.decoder(); }
  const std::vector<int32_t>& fed() const { return fed_; }   // the tokens in the slot
  const std::vector<int32_t>& told() const { return fed_; }  // the earlier name of fed()

 private:
  bool feed(std::span<const int32_t> ids, const SessionOptions& o);
  void sample(const SessionOptions& o, draft::AnswerDrafts* drafts, Answer& answer);
  std::optional<draft::AnswerDrafts> drafts_of(const SessionOptions& o);
  void slide(int32_t next);
  Sequence sequence_;
  std::vector<int32_t> fed_;
  std::optional<draft::StepCosts> step_costs_;  // measured before the first answer with drafts
};

}  // namespace ingot
