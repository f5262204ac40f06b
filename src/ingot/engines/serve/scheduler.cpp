#include "ingot/engines/serve/scheduler.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <utility>

#include "ingot/core/check.h"
#include "ingot/engines/serve/scheduler_state.h"

namespace ingot {
namespace {
// The pause before the next round where no client takes more tokens.
constexpr std::chrono::milliseconds kNobodyReady(5);
}  // namespace

using detail::seconds_between;

Scheduler::Scheduler(Decoder& decoder, const ServeOptions& options) : decoder_(decoder), options_(options) {
  INGOT_CHECK_GE(options.waiting, int64_t(0), "serve: waiting requests");
  INGOT_CHECK_GE(options.chunk, int64_t(0), "serve: tokens of a chunk");
  INGOT_CHECK(options.chunk_seconds > 0, "serve: found chunks of ", options.chunk_seconds, " s, expected more than 0");
  for (int64_t i = decoder.open_slots(); i < decoder.slots(); ++i) slots_.push_back({.number = decoder.open()});
  counts_.accepted_at.resize(size_t(std::max<int64_t>(0, std::min(options.draft.most, decoder.draft_rows() - 1))));
  INGOT_CHECK(!slots_.empty(), "serve: found a decoder without a free slot, expected at least one");
  // A measurement at the start delays no client. On a CPU the measurement may take seconds, so a server measures at its
  // start only where all answers are drafted.
  const bool now = options.drafted == DraftWhich::all ||
                   (options.drafted == DraftWhich::predicted && decoder.device().kind == Device::cuda);
  if (now && options.draft.make && decoder.draft_rows() > 1)
    draft::find_step_costs(step_costs_, options_.draft, decoder_, slots_[0].number);
  thread_ = std::thread([this] { run(); });
}

Scheduler::~Scheduler() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = draining_ = true;
  }
  changed_.notify_all();
  thread_.join();
  for (const Slot& s : slots_) decoder_.close(s.number);
}

// Checks everything that the decoder could refuse later. A refusal by the decoder would delay other requests.
void Scheduler::check(const ServeRequest& r) const {
  const int64_t vocab = decoder_.vocab();
  ingot::check(r.sampling);
  if (r.prompt.empty()) fail(ErrorCode::usage, "found an empty prompt, expected at least one token");
  for (const int32_t id : r.prompt)
    if (id < 0 || id >= vocab) fail(ErrorCode::usage, "found id ", id, " in the prompt, expected 0 to ", vocab - 1);
  const int64_t least = r.on_prompt ? 0 : 1;  // new tokens
  if (int64_t(r.prompt.size()) > decoder_.context() - std::min<int64_t>(r.tokens, 1))
    fail(ErrorCode::usage, "found a prompt of ", r.prompt.size(), " tokens, expected fewer than ", decoder_.context(),
         ", the context");
  if (r.tokens < least) fail(ErrorCode::usage, "found a limit of ", r.tokens, " tokens, expected at least ", least);
  const int64_t samplable = r.vocab > 0 ? r.vocab : vocab;
  INGOT_CHECK_LE(samplable, vocab, "serve: ids that may be sampled");
  if (r.logprobs > samplable)
    fail(ErrorCode::usage, "found ", r.logprobs, " logprobs, expected at most ", samplable, ", the vocabulary");
  for (const LogitBias& b : r.bias)
    if (b.id < 0 || b.id >= vocab) fail(ErrorCode::usage, "found id ", b.id, " with a bias, expected 0 to ", vocab - 1);
  for (const double penalty : {r.frequency_penalty, r.presence_penalty})
    INGOT_CHECK(penalty >= -2 && penalty <= 2, "serve: found a penalty of ", penalty, ", expected -2 to 2");
  INGOT_CHECK(r.on_token && r.on_end, "serve: found a request without on_token or on_end, expected both");
}

Scheduler::Handle Scheduler::submit(ServeRequest request) {
  check(request);
  auto job = std::make_shared<Job>();
  job->outcome.prompt = int64_t(request.prompt.size());
  if (drafts(request)) job->drafter = options_.draft.make(std::move(request.prediction));
  job->request = std::move(request);
  {
    const std::lock_guard lock(mutex_);
    if (draining_) fail(ErrorCode::busy, "the server is closing");
    // Free slots count too: a burst of requests that fits into the free slots does not wait.
    if (counts_.waiting + counts_.running >= options_.waiting + int64_t(slots_.size())) {
      ++counts_.refused;
      fail(ErrorCode::busy, "found ", counts_.waiting, " requests waiting, expected at most ", options_.waiting);
    }
    ++counts_.waiting;
    waiting_.push_back(job);
  }
  changed_.notify_all();
  return job;
}

std::shared_ptr<void> Scheduler::announce() {
  const std::lock_guard lock(mutex_);
  ++announced_;
  return {this, [](Scheduler* s) {
            const std::lock_guard lock(s->mutex_);
            if (--s->announced_ == 0) s->changed_.notify_all();
          }};
}

void Scheduler::cancel(const Handle& job) {
  job->cancelled = true;
  // Without the lock the scheduler's thread could miss a notification that arrives between its test and its sleep.
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

bool Scheduler::drain(double seconds) {
  std::unique_lock lock(mutex_);
  draining_ = true;
  return idle_.wait_for(lock, std::chrono::duration<double>(seconds),
                        [&] { return counts_.running + counts_.waiting == 0; });
}

ServeCounts Scheduler::counts() const {
  const std::lock_guard lock(mutex_);
  return counts_;
}

void Scheduler::run() {
  while (step()) {}
}

// One round: cancelled requests end, waiting requests get slots, one chunk of prompts is fed, and every running answer
// whose client is ready takes a step. False: the scheduler has ended.
bool Scheduler::step() {
  std::vector<Handle> ended;
  {
    std::unique_lock lock(mutex_);
    const auto to_do = [&] { return closing_ || !waiting_.empty() || !running_.empty(); };
    changed_.wait(lock, to_do);
    if (running_.empty())
      changed_.wait_for(lock, std::chrono::duration<double>(options_.announced_seconds),
                        [&] { return closing_ || announced_ == 0; });
    if (closing_) {
      for (const Handle& job : waiting_) job->cancelled = true;
      for (const Handle& job : running_) job->cancelled = true;
    }
    sweep(ended);
    if (closing_ && running_.empty() && waiting_.empty() && ended.empty()) return false;
  }
  for (const Handle& job : ended) finish(job, Finish::cancelled, job->outcome.error);
  admit();
  // Where the next step of the answers is being computed already, its tokens come before prompts that arrived
  // meanwhile.
  const bool prompts_wait = step_ahead_;
  const bool fed = !prompts_wait && feed_chunk(), sampled = sample_all();
  if (!fed && !sampled && !prompts_wait) {  // no client takes more tokens: try again soon, or at the next notification
    std::unique_lock lock(mutex_);
    if (!running_.empty()) changed_.wait_for(lock, kNobodyReady);
  }
  return true;
}

// Collects the requests that were cancelled, waiting or running, and those that waited too long. Under the lock.
void Scheduler::sweep(std::vector<Handle>& ended) {
  const auto now = Clock::now();
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    Job& job = **it;
    const bool late = seconds_between(job.arrived, now) > options_.wait_seconds;
    if (late && !job.cancelled)
      job.outcome.error = std::make_exception_ptr(Error(
          ErrorCode::busy, detail::concat("waited ", options_.wait_seconds, " s for a free slot, which did not come")));
    if (!late && !job.cancelled) {
      ++it;
      continue;
    }
    ended.push_back(*it);
    it = waiting_.erase(it);
  }
  for (const Handle& job : running_)
    if (job->cancelled) ended.push_back(job);
}

bool Scheduler::drafts(const ServeRequest& r) const {
  return options_.draft.make && decoder_.draft_rows() > 1 &&
         (options_.drafted == DraftWhich::all || (options_.drafted == DraftWhich::predicted && !r.prediction.empty()));
}

void Scheduler::finish(const Handle& job, Finish finish, std::exception_ptr error) {
  job->outcome.finish = finish;
  job->outcome.error = error;
  if (job->slot >= 0) {
    Slot& s = slots_[size_t(job->slot)];
    s.busy = false;
    s.used = Clock::now();
    // The decoder may hold accepted draft tokens behind the token that ended the answer.
    if (decoder_.length(s.number) > int64_t(s.held.size())) decoder_.rewind(s.number, int64_t(s.held.size()));
    // The last token may still be pending, and after an error only the decoder knows the length.
    s.held.resize(std::min(s.held.size(), size_t(decoder_.length(s.number))));
  }
  std::erase(running_, job);
  {
    const std::lock_guard lock(mutex_);
    ++(error                         ? counts_.failed
       : finish == Finish::cancelled ? counts_.cancelled
       : finish == Finish::stop      ? counts_.stopped
                                     : counts_.full);
  }
  try {
    job->request.on_end(job->outcome);
  } catch (...) {}  // the client has closed its connection; other requests are not affected
  const std::lock_guard lock(mutex_);
  --(job->slot >= 0 ? counts_.running : counts_.waiting);
  if (counts_.running + counts_.waiting == 0) idle_.notify_all();
}

}  // namespace ingot
