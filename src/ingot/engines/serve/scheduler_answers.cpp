// The steps of the running answers: each samples the next token of every answer, or the tokens of a draft.
#include <algorithm>
#include <exception>
#include <map>

#include "ingot/engines/serve/scheduler_state.h"

namespace ingot {

using detail::seconds_between;

// Samples for several slots together. If the call as a whole fails, each slot is sampled alone, so that one request
// cannot end the other requests.
std::vector<Sampled> Scheduler::sample(const std::vector<Decoder::Request>& requests) {
  try {
    return decoder_.sample(requests);
  } catch (...) {
    std::vector<Sampled> sampled(requests.size());
    for (size_t i = 0; i < requests.size(); ++i) try {
        sampled[i] = decoder_.sample(requests[i].slot, requests[i].options, requests[i].n);
      } catch (...) { sampled[i].error = std::current_exception(); }
    return sampled;
  }
}

// The answers that share the rows of a draft step.
int64_t Scheduler::answers_of_draft_step() const {
  if (decoder_.columns() == 1) return 1;
  return std::max<int64_t>(1, std::count_if(running_.begin(), running_.end(), [](const Handle& job) {
                             return job->drafts && !job->feeding() && !job->cancelled;
                           }));
}

// Prepares the draft of a job's next step, and the biases of penalties and the allowed tokens of each of its rows.
void Scheduler::prepare(Job& job) {
  const ServeRequest& r = job.request;
  std::span<const int32_t> draft;
  if (job.drafts) {
    job.drafts->choose(r.tokens - job.outcome.tokens - 1, answers_of_draft_step());
    draft = job.drafts->draft();
  }
  job.allowed.clear();
  if (r.allowed) {
    job.allowed = r.allowed(draft);
    draft = draft.first(std::min(draft.size(), job.allowed.size() - 1));
    if (job.drafts) job.drafts->shorten(draft.size());
  }
  job.bias.clear();
  std::map<int32_t, int64_t> sampled = job.sampled;
  for (size_t i = 0; i <= draft.size(); ++i) {
    if (i > 0) ++sampled[draft[i - 1]];
    std::vector<LogitBias>& bias = job.bias.emplace_back(r.bias);
    if (!r.has_penalty()) continue;
    for (const auto& [id, times] : sampled)
      bias.push_back({.id = id, .bias = -float(double(times) * r.frequency_penalty + r.presence_penalty)});
  }
  job.draft_rows.clear();
  for (size_t i = 1; i <= draft.size(); ++i) {
    job.draft_rows.push_back({.bias = job.bias[i]});
    if (!job.allowed.empty()) job.draft_rows.back().allowed = *job.allowed[i];
  }
}

// Returns the options for the next step of a prepared job. `drafting`: answers with drafts take a draft step.
// `prompts_follow`: a chunk of prompts comes after the next step. The decoder must then not begin the following step
// early, because the chunk would wait for this step, and the measured time of the chunk would be too long.
SampleOptions Scheduler::options_of(const Job& job, bool drafting, bool prompts_follow) const {
  const ServeRequest& r = job.request;
  SampleOptions o{.sampling = r.sampling,
                  .seed = r.seed,
                  .step = uint32_t(job.outcome.tokens),
                  .vocab = r.vocab,
                  .bias = job.bias[0],
                  .stop_ids = r.stop_ids,
                  .logprobs = r.logprobs};
  o.goes_on = !prompts_follow && !job.drafts && r.tokens - job.outcome.tokens > 1;
  if (!job.allowed.empty() && job.allowed[0]) o.allowed = *job.allowed[0];
  if (job.drafts && drafting) o.drafting = true, o.draft = job.drafts->draft(), o.draft_rows = job.draft_rows;
  return o;
}

// Takes a step of every answer, which yields a token, or several where a draft is accepted. Only answers whose client
// is ready take a step. False: no answer took a token.
bool Scheduler::sample_all() {
  step_ahead_ = false;
  bool ended = false;
  const std::vector<Handle> jobs = ready_answers(ended);
  if (jobs.empty()) return ended;
  const std::vector<Decoder::Request> requests = requests_of(jobs);
  step_ahead_ = decoder_.device().kind == Device::cuda &&
                std::any_of(requests.begin(), requests.end(), [](const auto& r) { return r.options.goes_on; });
  const std::vector<Sampled> sampled = sample(requests);
  for (size_t i = 0; i < jobs.size(); ++i) hand_out(jobs[i], sampled[i]);
  return true;
}

// The answers that take the next step, prepared for the step. `ended`: an error ended an answer.
std::vector<Scheduler::Handle> Scheduler::ready_answers(bool& ended) {
  std::vector<Handle> jobs;
  for (const Handle& job : std::vector<Handle>(running_)) {
    if (job->feeding() || job->cancelled) continue;
    const ServeRequest& r = job->request;
    try {
      if (r.ready && !r.ready()) continue;
      prepare(*job);
    } catch (...) {
      finish(job, Finish::cancelled, std::current_exception());
      ended = true;
      continue;
    }
    jobs.push_back(job);
  }
  return jobs;
}

// The decoder's requests for the next step of prepared answers.
std::vector<Decoder::Request> Scheduler::requests_of(const std::vector<Handle>& jobs) const {
  // If one answer has a draft, the answers without a draft take part in the same step.
  const bool drafting = options_.draft.exact || std::any_of(jobs.begin(), jobs.end(), [](const Handle& job) {
                          return job->drafts && !job->drafts->draft().empty();
                        });
  const bool prompts_follow =
      std::any_of(running_.begin(), running_.end(), [](const Handle& job) { return job->feeding(); });
  std::vector<Decoder::Request> requests;
  for (const Handle& job : jobs)
    requests.push_back({.slot = slots_[size_t(job->slot)].number,
                        .options = options_of(*job, drafting, prompts_follow),
                        .n = job->drafts && drafting ? job->request.tokens - job->outcome.tokens : 1});
  return requests;
}

// Hands the tokens of a step to the answer's client, and ends the answer where the step ends it.
void Scheduler::hand_out(const Handle& job, const Sampled& sampled) {
  // After an error the slot has no logits and no pending token, so that the request cannot continue.
  if (sampled.error) return finish(job, Finish::cancelled, sampled.error);
  bool goes_on = true;
  try {
    count_step(*job, sampled);
    for (size_t t = 0; t < sampled.tokens.size() && goes_on; ++t) {
      take(*job, sampled.tokens[t]);
      goes_on = job->request.on_token(sampled.tokens[t], job->request.logprobs < 0 ? nullptr : &sampled.logprobs[t]);
    }
  } catch (...) { return finish(job, Finish::cancelled, std::current_exception()); }
  if (!goes_on)
    finish(job, Finish::stop);
  else if (sampled.finish != Finish::length)
    finish(job, sampled.finish);
  else if (job->outcome.tokens >= job->request.tokens)
    finish(job, Finish::length);
}

void Scheduler::count_step(Job& job, const Sampled& sampled) {
  job.latest = Clock::now();
  if (job.outcome.tokens == 0) {
    job.first = job.latest;
    job.outcome.prompt_seconds = seconds_between(job.started, job.first);
  }
  job.outcome.token_seconds = seconds_between(job.first, job.latest);
  job.outcome.stop_id = sampled.stop_id;
  if (!job.drafts) return;
  job.drafts->learn(sampled);
  job.outcome.drafts = job.drafts->counts();
  const std::lock_guard lock(mutex_);
  counts_.drafts += sampled.drafted > 0;
  counts_.draft_tokens += sampled.drafted, counts_.accepted_tokens += sampled.accepted;
  for (size_t i = 0; i < size_t(sampled.accepted); ++i) ++counts_.accepted_at[i];
}

// Counts a sampled token and adds it to the tokens of the slot; a pending token enters the decoder's slot when the next
// token is sampled.
void Scheduler::take(Job& job, int32_t token) {
  ++job.outcome.tokens;
  job.pending = true;
  slots_[size_t(job.slot)].held.push_back(token);
  if (job.request.has_penalty()) ++job.sampled[token];
  const std::lock_guard lock(mutex_);
  ++counts_.tokens;
}

}  // namespace ingot
