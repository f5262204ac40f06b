// Which waiting request gets a slot next, which slot, and which tokens of the slot the prompt reuses.
#include <algorithm>
#include <exception>
#include <utility>

#include "ingot/engines/serve/scheduler_state.h"

namespace ingot {

using detail::common_prefix;
using detail::seconds_between;

// The oldest request of the client whose last turn is longest ago. Under the lock; some request waits.
Scheduler::Handle Scheduler::next_waiting() {
  // A client outside the list had no recent turn and comes first.
  const auto rank = [&](const Handle& job) {
    const auto turn = std::find(turns_.begin(), turns_.end(), job->request.client);
    return turn == turns_.end() ? int64_t(-1) : turn - turns_.begin();
  };
  auto best = waiting_.begin();
  for (auto it = waiting_.begin(); it != waiting_.end(); ++it)
    if (rank(*it) < rank(*best)) best = it;
  Handle job = *best;
  waiting_.erase(best);
  std::erase(turns_, job->request.client);
  turns_.push_back(job->request.client);
  constexpr size_t kClients = 256;
  if (turns_.size() > kClients) turns_.erase(turns_.begin());
  return job;
}

void Scheduler::admit() {
  while (true) {
    Handle job;
    {
      const std::lock_guard lock(mutex_);
      const bool room = std::any_of(slots_.begin(), slots_.end(), [](const Slot& s) { return !s.busy; });
      if (waiting_.empty() || !room) return;
      job = next_waiting();
      --counts_.waiting;
      ++counts_.running;
      running_.push_back(job);
    }
    try {
      start(*job, slot_for(*job));
    } catch (...) { finish(job, Finish::cancelled, std::current_exception()); }
  }
}

// The client's free slot that holds most of the prompt, else the least recently used free slot.
size_t Scheduler::slot_for(const Job& job) const {
  size_t best = slots_.size(), most = 0;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& s = slots_[i];
    if (s.busy) continue;
    const size_t known = s.client == job.request.client ? common_prefix(s.held, job.request.prompt) : 0;
    if (best == slots_.size() || known > most || (known == most && s.used < slots_[best].used)) best = i, most = known;
  }
  return best;
}

void Scheduler::start(Job& job, size_t index) {
  Slot& s = slots_[index];
  job.slot = int(index);
  job.started = Clock::now();
  job.outcome.queue_seconds = seconds_between(job.arrived, job.started);
  s.busy = true;
  const auto& prompt = job.request.prompt;
  size_t known = s.client == job.request.client ? common_prefix(s.held, prompt) : 0;
  known = std::min(known, prompt.size() - 1);  // the last token is fed again for its logits
  if (job.request.on_prompt) known = 0;        // the logits of every token are needed
  if (s.client != job.request.client) {        // tokens of another client are dropped
    decoder_.close(s.number);
    s.number = decoder_.open();
    s.held.clear();
  }
  if (job.drafter) {
    if (draft::find_step_costs(step_costs_, options_.draft, decoder_, s.number)) s.held.clear(), known = 0;
    job.drafts.emplace(std::move(job.drafter), draft::DraftPolicy(*step_costs_, options_.draft.most),
                       draft::guess_of_head(decoder_, s.number));
  }
  s.client = job.request.client;
  job.fed = size_t(decoder_.rewind(s.number, int64_t(known)));
  s.held.assign(prompt.begin(), prompt.begin() + int64_t(job.fed));
  job.outcome.reused = int64_t(job.fed);
  const std::lock_guard lock(mutex_);
  counts_.prompt_tokens += job.outcome.prompt;
  counts_.reused_tokens += job.outcome.reused;
}

// Copies tokens of the prompt that another slot of the same client holds, whether or not that slot is busy.
void Scheduler::copy_prefix(Job& job) {
  const auto& prompt = job.request.prompt;
  Slot& own = slots_[size_t(job.slot)];
  size_t most = job.fed;
  const Slot* from = nullptr;
  for (const Slot& s : slots_) {
    if (&s == &own || s.client != own.client || s.held.size() <= most || s.held[most] != prompt[most]) continue;
    // The last token of a slot may be pending, and the prompt's last token is fed again for its logits.
    const size_t known =
        std::min({common_prefix(s.held, prompt), size_t(decoder_.length(s.number)), prompt.size() - 1});
    if (known > most) most = known, from = &s;
  }
  if (from == nullptr || decoder_.copy_prefix(from->number, own.number, int64_t(most)) == 0) return;
  const int64_t copied = int64_t(most - job.fed);
  job.fed = most;
  own.held.assign(prompt.begin(), prompt.begin() + int64_t(most));
  job.outcome.reused += copied;
  const std::lock_guard lock(mutex_);
  counts_.reused_tokens += copied;
}

}  // namespace ingot
