#include "ingot/engines/generate/session.h"

#include <algorithm>
#include <chrono>

#include "ingot/core/clock.h"

namespace ingot {
namespace {

void check(const SessionOptions& o, std::span<const int32_t> prompt, const Decoder& d) {
  ingot::check(o.sampling);
  INGOT_CHECK_GE(o.tokens, int64_t(0), "generate: tokens");
  INGOT_CHECK(o.vocab >= 0 && o.vocab <= d.vocab(), "generate: found a vocabulary of ", o.vocab, ", expected at most ",
              d.vocab(), ", the model's");
  if (prompt.empty()) fail(ErrorCode::usage, "found an empty prompt, expected at least one token");
  for (size_t i = 0; i < prompt.size(); ++i)
    if (prompt[i] < 0 || prompt[i] >= d.vocab())
      fail(ErrorCode::usage, "found id ", prompt[i], " at position ", i, " of the prompt, expected 0 to ",
           d.vocab() - 1);
  if (!o.slide && int64_t(prompt.size()) > d.context())
    fail(ErrorCode::usage, "found a prompt of ", prompt.size(), " tokens, expected at most ", d.context(),
         ", the context");
}

}  // namespace

// Appends ids in batches. False: cancelled on the way.
bool Session::feed(std::span<const int32_t> ids, const SessionOptions& o) {
  const size_t batch = size_t(sequence_.decoder().batch());
  for (size_t at = 0; at < ids.size();) {
    if (o.cancelled && o.cancelled()) return false;
    const auto part = ids.subspan(at, std::min(batch, ids.size() - at));
    if (!sequence_.extend(part)) return false;
    at += part.size();
    fed_.insert(fed_.end(), part.begin(), part.end());
    if (o.on_prompt && ids.size() > 1) o.on_prompt(int64_t(at), int64_t(ids.size()));
  }
  return true;
}

void Session::forget() {
  sequence_.rewind(0);
  fed_.clear();
}

// The context is full: its newest half stays, with the pending token.
void Session::slide(int32_t next) {
  const int64_t kept = std::max<int64_t>(1, sequence_.decoder().context() / 2);
  std::vector<int32_t> half(fed_.end() - (kept - 1), fed_.end());
  half.push_back(next);
  forget();
  feed(half, {});
}

// Samples tokens until the answer ends; the slot has logits at the start.
void Session::sample(const SessionOptions& o, draft::AnswerDrafts* drafts, Answer& answer) {
  int64_t made = 0;
  SampleOptions d{.sampling = o.sampling, .seed = o.seed, .vocab = o.vocab, .bias = o.bias, .stop_ids = o.stop_ids};
  d.logprobs = o.logprobs;
  d.on_token = [&](int32_t token) {
    ++made;
    if (o.on_token && !o.on_token(token)) return false;
    return made == o.tokens || !o.cancelled || !o.cancelled();
  };
  while (true) {
    d.step = uint32_t(made);
    if (drafts != nullptr) {
      drafts->choose(o.tokens - made - 1);
      d.draft = drafts->draft(), d.drafting = o.draft.exact || !d.draft.empty();
      d.goes_on = made + 1 < o.tokens && drafts->expects_none();
    }
    // Without a draft, sample a single token, because the next draft may begin with this token.
    const bool alone = drafts != nullptr && !d.drafting;
    const Sampled sampled = sequence_.sample(d, alone ? 1 : o.tokens - made);
    if (drafts != nullptr) drafts->learn(sampled);
    answer.tokens.insert(answer.tokens.end(), sampled.tokens.begin(), sampled.tokens.end());
    answer.logprobs.insert(answer.logprobs.end(), sampled.logprobs.begin(), sampled.logprobs.end());
    answer.finish = sampled.finish;
    answer.stop_id = sampled.stop_id;
    fed_.insert(fed_.end(), sampled.tokens.begin(), sampled.tokens.end());
    // After a step the last token is pending, and the next step feeds it.
    if (drafts != nullptr && sampled.finish == Finish::length && made < o.tokens) continue;
    fed_.resize(size_t(sequence_.length()));  // the last token may be pending
    if (sampled.finish != Finish::context || !o.slide) return;
    slide(answer.tokens.back());
  }
}

// The drafts of an answer, if any. Unknown costs of steps are measured in the slot, which is then empty.
std::optional<draft::AnswerDrafts> Session::drafts_of(const SessionOptions& o) {
  if (!o.draft.make) return {};
  if (draft::find_step_costs(step_costs_, o.draft, sequence_.decoder(), sequence_.slot())) fed_.clear();
  return draft::AnswerDrafts(o.draft.make({}), draft::DraftPolicy(*step_costs_, o.draft.most),
                             draft::guess_of_head(sequence_.decoder(), sequence_.slot()));
}

Answer Session::generate(std::span<const int32_t> prompt, const SessionOptions& o) {
  check(o, prompt, sequence_.decoder());
  const int64_t context = sequence_.decoder().context();
  if (int64_t(prompt.size()) > context) prompt = prompt.last(size_t(context));
  Answer answer{.prompt = int64_t(prompt.size())};
  try {
    std::optional<draft::AnswerDrafts> drafts = drafts_of(o);
    if (drafts) drafts->append(prompt);
    auto start = Clock::now();
    // The last token is always fed again, because its logits are needed.
    const auto differ = std::mismatch(fed_.begin(), fed_.end(), prompt.begin(), prompt.end() - 1);
    answer.reused = sequence_.rewind(differ.first - fed_.begin());
    fed_.resize(size_t(answer.reused));
    const bool ready = feed(prompt.subspan(size_t(answer.reused)), o);
    answer.prompt_seconds = seconds_since(start);
    if (ready) sequence_.checkpoint();
    const bool goes_on = ready && !(o.tokens > 0 && o.cancelled && o.cancelled());
    answer.finish = goes_on ? Finish::length : Finish::cancelled;
    start = Clock::now();
    if (goes_on && o.tokens > 0) sample(o, drafts ? &*drafts : nullptr, answer);
    if (drafts) answer.drafts = drafts->counts();
    answer.token_seconds = seconds_since(start);
  } catch (...) {
    forget();
    throw;
  }
  return answer;
}

}  // namespace ingot
