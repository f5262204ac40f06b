#include "ingot/engines/serve/scheduler.h"

#include <algorithm>
#include <map>

#include "ingot/models/host_sampling.h"

namespace ingot {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kNobodyReady(5);
// Smaller chunks read all weights for few tokens.
constexpr int64_t kLeastChunk = 64;
// A prompt that shares at least this many further tokens with a prompt of the chunk waits, and then copies these
// tokens.
constexpr size_t kLeastShared = 64;

size_t common_prefix(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  return size_t(std::mismatch(a.begin(), a.end(), b.begin(), b.end()).first - a.begin());
}
double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace

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
  // Of the next step: biases and masks of the next token, then of the tokens after each draft token.
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

Scheduler::Scheduler(Decoder& decoder, const ServeOptions& options) : decoder_(decoder), options_(options) {
  INGOT_CHECK_GE(options.waiting, int64_t(0), "serve: waiting requests");
  INGOT_CHECK_GE(options.chunk, int64_t(0), "serve: tokens of a chunk");
  INGOT_CHECK(options.chunk_seconds > 0, "serve: found chunks of ", options.chunk_seconds, " s, expected more than 0");
  for (int64_t i = decoder.open_slots(); i < decoder.slots(); ++i) slots_.push_back({.number = decoder.open()});
  counts_.accepted_at.resize(size_t(std::max<int64_t>(0, std::min(options.draft.most, decoder.draft_rows() - 1))));
  INGOT_CHECK(!slots_.empty(), "serve: found a decoder without a free slot, expected at least one");
  // Measured now, no client waits for the measurement. On a CPU it may take seconds, which a server spends at its start
  // only where all answers are drafted.
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

// Checks everything that the decoder could refuse later, while other requests would wait.
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
  // Under the lock, or the thread could miss the notification between its test and its sleep.
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

// One round: cancelled requests end, waiting requests get slots, one chunk of a prompt is fed, every running answer
// gets a token. False: the scheduler has ended.
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

bool Scheduler::drafts(const ServeRequest& r) const {
  return options_.draft.make && decoder_.draft_rows() > 1 &&
         (options_.drafted == DraftWhich::all || (options_.drafted == DraftWhich::predicted && !r.prediction.empty()));
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

// The tokens that are fed between two tokens of the running answers: parts of prompts, or a part of one prompt that is
// scored. Where prompts share a pass over the weights, the pending tokens of running answers share this pass too.
struct Scheduler::Chunk {
  std::vector<Handle> jobs;
  std::vector<std::span<const int32_t>> parts;
  std::vector<Handle> answers;
  bool scored() const { return !jobs.empty() && jobs[0]->request.on_prompt; }
};

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

// Feeds the pending token of an answer again, after an error of a pass that it shared with prompts. The decoder may
// hold the token or not.
void Scheduler::feed_pending(const Handle& job) {
  try {
    const Slot& s = slots_[size_t(job->slot)];
    const std::span<const int32_t> held = s.held;
    job->pending = false;
    const int64_t kept = decoder_.rewind(s.number, int64_t(held.size()) - 1);
    if (!decoder_.extend(s.number, held.subspan(size_t(kept)))) finish(job, Finish::cancelled);
  } catch (...) { finish(job, Finish::cancelled, std::current_exception()); }
}

// The result has an entry for each job, then for each answer.
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

// Of the next step of a prepared job. `drafting`: answers with drafts take a draft step. `prompts_follow`: a chunk of
// prompts comes before the step after the next one; the decoder must not begin that step early, because the chunk would
// wait for the step and seem to take longer.
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
  std::vector<Handle> jobs;
  std::vector<Decoder::Request> requests;
  bool ended = false;
  step_ahead_ = false;
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
  if (jobs.empty()) return ended;
  // Where one answer has a draft, answers without one share its step.
  const bool drafting = options_.draft.exact || std::any_of(jobs.begin(), jobs.end(), [](const Handle& job) {
                          return job->drafts && !job->drafts->draft().empty();
                        });
  const bool prompts_follow =
      std::any_of(running_.begin(), running_.end(), [](const Handle& job) { return job->feeding(); });
  for (const Handle& job : jobs)
    requests.push_back({.slot = slots_[size_t(job->slot)].number,
                        .options = options_of(*job, drafting, prompts_follow),
                        .n = job->drafts && drafting ? job->request.tokens - job->outcome.tokens : 1});
  step_ahead_ = decoder_.device().kind == Device::cuda &&
                std::any_of(requests.begin(), requests.end(), [](const auto& r) { return r.options.goes_on; });
  const std::vector<Sampled> sampled = sample(requests);
  for (size_t i = 0; i < jobs.size(); ++i) {
    Job& job = *jobs[i];
    // After an error the slot has no logits and no pending token, so that the request cannot continue.
    if (sampled[i].error) {
      finish(jobs[i], Finish::cancelled, sampled[i].error);
      continue;
    }
    bool goes_on = true;
    try {
      count_step(job, sampled[i]);
      for (size_t t = 0; t < sampled[i].tokens.size() && goes_on; ++t) {
        take(job, sampled[i].tokens[t]);
        goes_on =
            job.request.on_token(sampled[i].tokens[t], job.request.logprobs < 0 ? nullptr : &sampled[i].logprobs[t]);
      }
    } catch (...) {
      finish(jobs[i], Finish::cancelled, std::current_exception());
      continue;
    }
    if (!goes_on)
      finish(jobs[i], Finish::stop);
    else if (sampled[i].finish != Finish::length)
      finish(jobs[i], sampled[i].finish);
    else if (job.outcome.tokens >= job.request.tokens)
      finish(jobs[i], Finish::length);
  }
  return true;
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
