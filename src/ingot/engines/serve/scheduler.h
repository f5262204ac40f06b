#pragma once
// Many requests, one decoder. A thread of its own owns the decoder: it gives waiting requests a slot, tells prompts in
// chunks, and between two chunks draws one token for everyone who answers, so no stream waits longer than a chunk.
// Which client is next is decided by turns, so that one with many requests does not keep out the others.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ingot/models/decoder.h"

namespace ingot {

struct ServeOptions {
  int64_t waiting = 64;       // most requests without a slot; one more is Error{busy}
  double wait_seconds = 120;  // a request that got no slot for so long ends with Error{busy}
  int64_t chunk = 256;        // most tokens of a prompt between two draws; never more than the decoder's batch
};

// How a request ended.
struct ServeOutcome {
  Finish finish = Finish::length;
  int32_t stop_id = -1;
  std::exception_ptr error;        // what ended it otherwise
  int64_t prompt = 0, reused = 0;  // tokens of the prompt; those that a slot still held
  int64_t tokens = 0;              // new ones
  double queue_seconds = 0;        // until it had a slot
  double prompt_seconds = 0;       // from there to the first token
  double token_seconds = 0;        // from the first token to the last
};

struct ServeRequest {
  std::vector<int32_t> prompt;
  int64_t tokens = 1;  // most new ones, at least 1; 0 where the prompt alone is scored
  SamplingOptions sampling;
  uint64_t seed = 1;
  int64_t vocab = 0;  // DrawOptions
  std::vector<LogitBias> bias;
  std::vector<int32_t> stop_ids;
  int64_t logprobs = -1;
  // Of a token that was drawn: so much less likely for each time, and once.
  double frequency_penalty = 0, presence_penalty = 0;
  // Which tokens may come next, as DrawOptions::allowed has it; asked before each draw. Empty: all.
  std::function<std::shared_ptr<const std::vector<uint32_t>>()> allowed;
  // Asked before each draw; while it says false the request keeps its slot and gets no token. Empty: always.
  std::function<bool()> ready;
  std::string client;  // whose turn it is, and who may use what a slot still holds: only its own
  // Given: the prompt is scored. It is computed whole, and before the first new token this gets, in order and in one or
  // more calls, the logprobs of the prompt's tokens from its second one on, each with the `logprobs` likeliest in its
  // place. On the scheduler's thread.
  std::function<void(std::span<const TokenLogprobs>)> on_prompt;
  // On the scheduler's thread, as `allowed` is, and short. False ends the answer with this token, as stop. on_end comes
  // exactly once for a request that was taken, and last.
  std::function<bool(int32_t, const TokenLogprobs*)> on_token;
  std::function<void(const ServeOutcome&)> on_end;
};

// Counters since the start; the last two are of this moment.
struct ServeCounts {
  int64_t prompt_tokens = 0, reused_tokens = 0, tokens = 0;
  int64_t stopped = 0, full = 0, cancelled = 0, failed = 0, refused = 0;
  int64_t running = 0, waiting = 0;
};

class Scheduler {
 public:
  class Job;
  using Handle = std::shared_ptr<Job>;

  // The decoder must outlive it, and nobody else uses it meanwhile.
  explicit Scheduler(Decoder& decoder, const ServeOptions& options = {});
  ~Scheduler();  // cancels what there is
  Scheduler(const Scheduler&) = delete;

  // From any thread. Error{usage} for what the model cannot do, Error{busy} where too many wait or it is closing.
  Handle submit(ServeRequest request);
  // From any thread, also twice and after the end: it ends with Finish::cancelled before its next token or chunk.
  void cancel(const Handle& job);

  // No more requests are taken. True once all have ended, within the time.
  bool drain(double seconds);
  ServeCounts counts() const;

 private:
  struct Slot;
  void check(const ServeRequest& r) const;
  void run();
  bool step();
  void sweep(std::vector<Handle>& ended);
  Handle next_waiting();
  void admit();
  size_t slot_for(const Job& job) const;
  void start(Job& job, size_t slot);
  bool tell_chunk();
  bool tell(Job& job, std::span<const int32_t> part);
  bool draw_all();
  void prepare(Job& job);
  std::vector<Drawn> draw(const std::vector<Decoder::Request>& requests);
  void take(Job& job, const Drawn& drawn);
  void finish(const Handle& job, Finish finish, std::exception_ptr error = {});

  Decoder& decoder_;
  const ServeOptions options_;
  mutable std::mutex mutex_;
  std::condition_variable changed_, idle_;
  std::deque<Handle> waiting_;      // by arrival
  std::vector<std::string> turns_;  // clients that got a slot, the latest last
  bool draining_ = false, closing_ = false;
  ServeCounts counts_;
  // The thread's own.
  std::vector<Slot> slots_;
  std::vector<Handle> running_;
  size_t turn_ = 0;  // whose prompt is told next
  std::thread thread_;
};

}  // namespace ingot
