// Prompts are fed in chunks, between the steps of the running answers.
#include <algorithm>
#include <exception>
#include <iterator>

#include "ingot/engines/serve/scheduler_state.h"
#include "ingot/models/host_sampling.h"

namespace ingot {
namespace {
// Smaller chunks read all weights for few tokens.
constexpr int64_t kLeastChunk = 64;
// A prompt that shares at least this many further tokens with a prompt of the chunk waits, and then copies these
// tokens.
constexpr size_t kLeastShared = 64;
}  // namespace

using detail::common_prefix;
using detail::seconds_between;

// Prompts take turns; as many are in the chunk as its tokens allow. If no answer waits for a token, a GPU gets as many
// tokens as its batch holds, because each pass over prompts reads all weights.
Scheduler::Chunk Scheduler::next_chunk() {
  const bool awaited = std::any_of(running_.begin(), running_.end(), [](const Handle& job) { return !job->feeding(); });
  const bool alone = !awaited && decoder_.device().kind == Device::cuda;
  const int64_t most = options_.chunk > 0 ? options_.chunk : chunk_tokens_;
  Chunk chunk{.answers = answers_beside_prompts()};
  const int64_t batch = decoder_.batch() - int64_t(chunk.answers.size());
  size_t room = size_t(alone ? batch : std::min(most, batch));
  const std::vector<Handle> running = running_;
  const size_t first = turn_;
  for (size_t i = 0; i < running.size() && room > 0; ++i) {
    const size_t at = (first + i) % running.size();
    const Handle& job = running[at];
    const bool scored = bool(job->request.on_prompt);
    if (!job->feeding() || job->cancelled || (scored && !chunk.jobs.empty())) continue;
    try {
      if (!scored) copy_prefix(*job);
    } catch (...) {
      finish(job, Finish::cancelled, std::current_exception());
      continue;
    }
    if (shares_with(chunk, *job)) continue;
    const std::span<const int32_t> rest = std::span<const int32_t>(job->request.prompt).subspan(job->fed);
    chunk.parts.push_back(rest.first(std::min(room, rest.size())));
    room -= chunk.parts.back().size();
    // A prompt of which only a part fits into the chunk begins the next chunk. A prompt that began this chunk had its
    // turn, and the next prompt begins.
    turn_ = chunk.parts.back().size() < rest.size() && !chunk.jobs.empty() ? at : at + 1;
    chunk.jobs.push_back(job);
    if (scored || !decoder_.extends_together()) break;
  }
  if (chunk.scored()) chunk.answers.clear();
  return chunk;
}

// The answers whose pending tokens are fed together with prompts. Answers with drafts take draft steps only.
std::vector<Scheduler::Handle> Scheduler::answers_beside_prompts() const {
  std::vector<Handle> answers;
  if (!decoder_.extends_together()) return answers;
  std::copy_if(running_.begin(), running_.end(), std::back_inserter(answers), [&](const Handle& job) {
    return job->pending && !job->drafts && !job->cancelled &&
           decoder_.length(slots_[size_t(job->slot)].number) < decoder_.context();
  });
  // A batch has room for at least as many tokens of prompts.
  answers.resize(std::min(answers.size(), size_t(decoder_.batch() / 2)));
  return answers;
}

// Whether a prompt of the chunk computes tokens that the job can copy afterwards.
bool Scheduler::shares_with(const Chunk& chunk, const Job& job) const {
  const auto& prompt = job.request.prompt;
  return std::any_of(chunk.jobs.begin(), chunk.jobs.end(), [&](const Handle& other) {
    const auto& theirs = other->request.prompt;
    return !job.request.on_prompt && other->request.client == job.request.client && job.fed < theirs.size() &&
           theirs[job.fed] == prompt[job.fed] &&
           std::min(common_prefix(theirs, prompt), prompt.size() - 1) >= job.fed + kLeastShared;
  });
}

// Feeds a chunk. False: no prompt was left to feed.
bool Scheduler::feed_chunk() {
  const Chunk chunk = next_chunk();
  if (chunk.jobs.empty()) return false;
  std::vector<bool> fed;
  try {
    if (chunk.scored())
      fed = {feed_scored(*chunk.jobs[0], chunk.parts[0])};
    else
      fed = feed(chunk);
  } catch (...) {
    for (const Handle& job : chunk.jobs) finish(job, Finish::cancelled, std::current_exception());
    for (const Handle& job : chunk.answers) feed_pending(job);
    return true;
  }
  for (size_t i = 0; i < chunk.answers.size(); ++i) {
    chunk.answers[i]->pending = false;
    if (!fed[chunk.jobs.size() + i]) finish(chunk.answers[i], Finish::cancelled);
  }
  for (size_t i = 0; i < chunk.jobs.size(); ++i) {
    if (fed[i])
      advance(chunk.jobs[i], chunk.parts[i].size());
    else
      finish(chunk.jobs[i], Finish::cancelled);
  }
  return true;
}

// Feeds the pending token of an answer again after a pass of this token and prompts has failed. The decoder may or may
// not hold the token by then.
void Scheduler::feed_pending(const Handle& job) {
  try {
    const Slot& s = slots_[size_t(job->slot)];
    const std::span<const int32_t> held = s.held;
    job->pending = false;
    const int64_t kept = decoder_.rewind(s.number, int64_t(held.size()) - 1);
    if (!decoder_.extend(s.number, held.subspan(size_t(kept)))) finish(job, Finish::cancelled);
  } catch (...) { finish(job, Finish::cancelled, std::current_exception()); }
}

// The result has one entry for each job, followed by one entry for each answer.
std::vector<bool> Scheduler::feed(const Chunk& chunk) {
  std::vector<Decoder::Part> parts;
  int64_t tokens = 0;
  for (size_t i = 0; i < chunk.jobs.size(); ++i) {
    parts.push_back({slots_[size_t(chunk.jobs[i]->slot)].number, chunk.parts[i]});
    tokens += int64_t(chunk.parts[i].size());
  }
  for (const Handle& job : chunk.answers) {
    const Slot& s = slots_[size_t(job->slot)];
    parts.push_back({s.number, std::span(s.held).last(1)});
  }
  const auto begin = Clock::now();
  std::vector<bool> fed = decoder_.extend(parts);
  learn(tokens, seconds_between(begin, Clock::now()));
  return fed;
}

// A chunk takes a constant time plus a time for each token. Chunk sizes that are scaled repeatedly by the ratio of
// wanted to measured time therefore converge; a chunk much shorter than the target gives little information.
void Scheduler::learn(int64_t tokens, double seconds) {
  if (2 * tokens < std::min(chunk_tokens_, decoder_.batch())) return;
  const double wanted = double(tokens) * options_.chunk_seconds / std::max(seconds, 1e-9);
  const double within = std::clamp(wanted, double(tokens) / 4, double(tokens) * 4);
  chunk_tokens_ = std::max(kLeastChunk, int64_t(within));
}

// Counts a part of a job's prompt as fed.
void Scheduler::advance(const Handle& job, size_t tokens) {
  try {
    Slot& s = slots_[size_t(job->slot)];
    const auto begin = job->request.prompt.begin() + int64_t(job->fed);
    s.held.insert(s.held.end(), begin, begin + int64_t(tokens));
    job->fed += tokens;
    if (job->feeding()) return;
    if (job->drafts) job->drafts->append(job->request.prompt);
    decoder_.checkpoint(s.number);
    if (job->request.tokens > 0) return;
    job->outcome.prompt_seconds = seconds_between(job->started, Clock::now());
    finish(job, Finish::length);
  } catch (...) { finish(job, Finish::cancelled, std::current_exception()); }
}

// Appends a part of a job's prompt to its slot and scores the tokens that follow the part's tokens. False: cancelled.
bool Scheduler::feed_scored(Job& job, std::span<const int32_t> part) {
  const ServeRequest& r = job.request;
  const int slot = slots_[size_t(job.slot)].number;
  const int64_t vocab = r.vocab > 0 ? r.vocab : decoder_.vocab();
  return decoder_.extend(slot, part, Decoder::Rows::all, [&](int64_t position, const Tensor& logits) {
    std::vector<TokenLogprobs> scores;
    for (int64_t i = 0; i < logits.size(0); ++i) {
      const size_t next = size_t(position + i + 1);
      if (next < r.prompt.size())
        scores.push_back(logprobs_of(logits.row(i), vocab, r.prompt[next], std::max<int64_t>(r.logprobs, 0)));
    }
    r.on_prompt(scores);
  });
}

}  // namespace ingot
