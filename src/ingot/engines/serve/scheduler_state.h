#pragma once
// The state of the scheduler: a request, a slot, and a chunk of prompts.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "ingot/core/clock.h"
#include "ingot/engines/serve/scheduler.h"

namespace ingot {
namespace detail {

inline double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}
inline size_t common_prefix(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  return size_t(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}

}  // namespace detail

class Scheduler::Job {
 public:
  ServeRequest request;
  std::atomic<bool> cancelled = false;
  Clock::time_point arrived = Clock::now(), started, first, latest;
  int slot = -1;         // index into slots_, or none yet
  size_t fed = 0;        // tokens of the prompt that the slot holds
  bool pending = false;  // the last sampled token has not been fed to the model
  ServeOutcome outcome;
  std::map<int32_t, int64_t> sampled;         // how often each token was sampled, where penalties need the count
  std::unique_ptr<draft::Drafter> drafter;    // until the request has a slot
  std::optional<draft::AnswerDrafts> drafts;  // none: the answer is not drafted
  // For the next step: biases and masks of the next token, then of the tokens after each draft token.
  std::vector<std::vector<LogitBias>> bias;
  std::vector<ServeRequest::Mask> allowed;
  std::vector<DraftRow> draft_rows;
  bool feeding() const { return fed < request.prompt.size(); }
};

// A slot stays open between requests, so that its client's next prompt can reuse the tokens in the slot.
struct Scheduler::Slot {
  int number = -1;            // of the decoder's slot
  std::vector<int32_t> held;  // the tokens in the slot
  std::string client;
  Clock::time_point used;
  bool busy = false;
};

// The tokens that are fed between two tokens of the running answers: parts of prompts, or a part of one prompt that is
// scored. Where prompts share a pass over the weights, the pending tokens of running answers share this pass too.
struct Scheduler::Chunk {
  std::vector<Handle> jobs;
  std::vector<std::span<const int32_t>> parts;
  std::vector<Handle> answers;
  bool scored() const { return !jobs.empty() && jobs[0]->request.on_prompt; }
};

}  // namespace ingot
