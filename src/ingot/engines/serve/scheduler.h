#pragma once
// Many requests share one decoder. The scheduler's own thread owns the decoder: the thread gives waiting requests a
// slot, feeds prompts in chunks, and between two chunks samples one token for every running answer, so that no stream
// waits longer than a chunk. A chunk holds parts of several prompts where the decoder computes these together. Clients
// take turns, so that a client with many requests does not block the rest.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "ingot/models/decoder.h"
#include "ingot/models/draft/answer_drafts.h"

namespace ingot {

// Which answers are drafted, where the decoder computes drafts (models/draft).
enum class DraftWhich { none, predicted, all };  // predicted: of requests with a prediction

struct ServeOptions {
  int64_t waiting = 64;       // most requests without a slot; a further request is Error{busy}
  double wait_seconds = 120;  // a request that waits longer for a slot ends with Error{busy}
  // The time that prompts may take between two sampled tokens of the running answers. The number of tokens in a chunk
  // follows from the measured times of earlier chunks.
  double chunk_seconds = 0.05;
  DraftWhich drafted = DraftWhich::predicted;
  draft::Options draft = {.make = draft::make_lookup};
  // How long an idle scheduler waits for announced requests, so that prompts that arrive at once share a pass.
  double announced_seconds = 0.002;
  // The most tokens of a chunk, at most the decoder's batch; 0: as many as chunk_seconds allows.
  int64_t chunk = 0;
};

// How a request ended.
struct ServeOutcome {
  Finish finish = Finish::length;
  int32_t stop_id = -1;
  std::exception_ptr error;        // the error that ended the request, if any
  int64_t prompt = 0, reused = 0;  // tokens of the prompt, and how many of them the slot already held
  int64_t tokens = 0;              // new tokens
  double queue_seconds = 0;        // from arrival to a slot
  double prompt_seconds = 0;       // from the slot to the first token
  double token_seconds = 0;        // from the first token to the last
  draft::Counts drafts;
};

struct ServeRequest {
  std::vector<int32_t> prompt;
  int64_t tokens = 1;  // most new tokens, at least 1; 0 if only the prompt is scored
  SamplingOptions sampling;
  uint64_t seed = 1;
  int64_t vocab = 0;  // ids from here on are never sampled; 0: the model's vocabulary
  std::vector<LogitBias> bias;
  std::vector<int32_t> stop_ids;
  int64_t logprobs = -1;  // the number of likeliest tokens that come with each token's logprob; -1: no logprobs
  // Subtracted from the logits of the answer's tokens: the first for each occurrence of a token, the second once.
  double frequency_penalty = 0, presence_penalty = 0;
  bool has_penalty() const { return frequency_penalty != 0 || presence_penalty != 0; }
  // The tokens that may come next, as in SampleOptions::allowed, and the tokens that may come after each token of a
  // draft, up to the first draft token that is not allowed. Called before each step. Empty: all tokens.
  using Mask = std::shared_ptr<const std::vector<uint32_t>>;
  std::function<std::vector<Mask>(std::span<const int32_t> draft)> allowed;
  std::vector<int32_t> prediction;  // tokens that the answer is expected to contain, in order, or empty
  // Called before each token is sampled; while the result is false the request keeps its slot and gets no token. Empty:
  // always ready.
  std::function<bool()> ready;
  std::string client;  // clients take turns, and only the same client reuses the tokens of a slot
  // Where set, the prompt is scored: the whole prompt is computed, and before the first new token the function
  // receives, in order and in one or more calls, the logprobs of the prompt's tokens from the second token on, each
  // with the `logprobs` likeliest tokens of that position. Called on the scheduler's thread.
  std::function<void(std::span<const TokenLogprobs>)> on_prompt;
  // Both functions are called on the scheduler's thread, like `allowed`, and must return quickly. Where on_token
  // returns false, the answer ends after this token, with Finish::stop. on_end is called exactly once for an accepted
  // request, after all other functions.
  std::function<bool(int32_t, const TokenLogprobs*)> on_token;
  std::function<void(const ServeOutcome&)> on_end;
};

// Counters since the start; `running` and `waiting` are the present numbers.
struct ServeCounts {
  int64_t prompt_tokens = 0, reused_tokens = 0, tokens = 0;
  int64_t stopped = 0, full = 0, cancelled = 0, failed = 0, refused = 0;
  int64_t running = 0, waiting = 0;
  int64_t drafts = 0, draft_tokens = 0, accepted_tokens = 0;  // as draft::Counts
  std::vector<int64_t> accepted_at;
};

class Scheduler {
 public:
  class Job;
  using Handle = std::shared_ptr<Job>;

  // The decoder must outlive the scheduler, and only the scheduler may use the decoder.
  explicit Scheduler(Decoder& decoder, const ServeOptions& options = {});
  ~Scheduler();  // cancels all requests
  Scheduler(const Scheduler&) = delete;

  // May be called from any thread. Throws Error{usage} for a request that the model cannot serve, and Error{busy} if
  // too many requests wait or the scheduler is closing.
  Handle submit(ServeRequest request);
  // Says that a request is being received, until the result is released; the scheduler must outlive the result. May be
  // called from any thread.
  std::shared_ptr<void> announce();
  // May be called from any thread, repeatedly, and after the request has ended. A running request ends with
  // Finish::cancelled before its next token or chunk.
  void cancel(const Handle& job);

  // Accepts no further requests. Returns true if all requests end within the time.
  bool drain(double seconds);
  ServeCounts counts() const;

 private:
  struct Slot;
  struct Chunk;

  void check(const ServeRequest& r) const;
  bool drafts(const ServeRequest& r) const;
  void run();
  bool step();
  void sweep(std::vector<Handle>& ended);
  void finish(const Handle& job, Finish finish, std::exception_ptr error = {});

  // scheduler_slots.cpp
  Handle next_waiting();
  void admit();
  size_t slot_for(const Job& job) const;
  void start(Job& job, size_t slot);
  void copy_prefix(Job& job);

  // scheduler_prompts.cpp
  Chunk next_chunk();
  std::vector<Handle> answers_beside_prompts() const;
  bool shares_with(const Chunk& chunk, const Job& job) const;
  bool feed_chunk();
  std::vector<bool> feed(const Chunk& chunk);
  void feed_pending(const Handle& job);
  bool feed_scored(Job& job, std::span<const int32_t> part);
  void learn(int64_t tokens, double seconds);
  void advance(const Handle& job, size_t tokens);

  // scheduler_answers.cpp
  bool sample_all();
  std::vector<Handle> ready_answers(bool& ended);
  std::vector<Decoder::Request> requests_of(const std::vector<Handle>& jobs) const;
  void hand_out(const Handle& job, const Sampled& sampled);
  int64_t answers_of_draft_step() const;
  void prepare(Job& job);
  SampleOptions options_of(const Job& job, bool drafting, bool prompts_follow) const;
  std::vector<Sampled> sample(const std::vector<Decoder::Request>& requests);
  void count_step(Job& job, const Sampled& sampled);
  void take(Job& job, int32_t token);

  Decoder& decoder_;
  const ServeOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_, idle_;
  std::deque<Handle> waiting_;      // in the order of arrival
  int64_t announced_ = 0;           // requests that are being received
  std::vector<std::string> turns_;  // clients that got a slot, the latest last
  bool draining_ = false, closing_ = false;
  ServeCounts counts_;
  // Used by the scheduler's thread only.
  std::vector<Slot> slots_;
  std::vector<Handle> running_;
  bool step_ahead_ = false;                     // a GPU may compute the next step of the running answers already
  size_t turn_ = 0;                             // the request whose prompt is fed next
  int64_t chunk_tokens_ = 256;                  // size of the next chunk according to the measured times
  std::optional<draft::StepCosts> step_costs_;  // of the options, or measured before the first answer with drafts
  std::thread thread_;
};

}  // namespace ingot
