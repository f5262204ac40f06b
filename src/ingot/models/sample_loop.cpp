// The loop of sample(): pending tokens are fed to the model, one token of each answer is sampled, and between two
// tokens the stop ids, the context and cancellation are checked. An engine with several columns samples one token of
// each answer at a time; an engine with one column samples one answer after another.
#include <algorithm>
#include <cmath>

#include "ingot/models/decoder.h"

namespace ingot {

// The tokens that a call has sampled for a slot so far.
struct Decoder::Answer {
  int slot;
  const SampleOptions& options;
  int64_t n;
  int32_t pending;  // -1: the slot has logits
  Sampled result;
  bool ended = false, stepped = false;  // stepped: the only step of a call with `drafting` has been taken

  SlotSample next() const {
    const int64_t sampled = int64_t(result.tokens.size());
    // No single step is started early after a draft step, because draft steps and single steps take different paths.
    const bool goes_on = !options.drafting && (options.goes_on || sampled + 1 < n);
    return {.slot = slot, .options = &options, .step = options.step + uint32_t(sampled), .goes_on = goes_on};
  }
  void end(Finish finish) {
    result.finish = finish;
    ended = true;
  }
  void end_with_error() {
    result.error = std::current_exception();
    ended = true;
  }
  // The sampled token ends the answer, or becomes the pending token.
  void append(SampledToken sampled) {
    if (std::find(options.stop_ids.begin(), options.stop_ids.end(), sampled.token) != options.stop_ids.end()) {
      result.stop_id = sampled.token;
      return end(Finish::stop);
    }
    result.tokens.push_back(sampled.token);
    if (options.logprobs >= 0) result.logprobs.push_back(std::move(sampled.logprobs));
    pending = sampled.token;
    if (options.on_token && !options.on_token(sampled.token)) end(Finish::cancelled);
  }
};

void Decoder::check_sample(int slot, const SampleOptions& o, int64_t n) {
  INGOT_CHECK(state(slot).next != Next::nothing, "sample: found slot ", slot,
              " without logits or a pending token, expected extend() before");
  INGOT_CHECK(n >= 1, "sample: found ", n, " tokens, expected at least 1");
  check(o.sampling);
  INGOT_CHECK(o.vocab >= 0 && o.vocab <= vocab(), "sample: found a vocabulary of ", o.vocab, ", expected at most ",
              vocab(), ", the model's");
  const int64_t ids = vocab_of(o);
  INGOT_CHECK(o.logprobs >= -1 && o.logprobs <= ids, "sample: found logprobs of ", o.logprobs,
              " tokens, expected -1 (none) to ", ids, ", the vocabulary");
  check_token_choice(o.bias, o.allowed, ids);
  if (!o.drafting) return;
  INGOT_CHECK(draft_rows() > 1, "sample: found a draft step, expected none: this engine computes no drafts");
  INGOT_CHECK(o.draft_rows.empty() || o.draft_rows.size() == o.draft.size(), "sample: found ", o.draft_rows.size(),
              " rows for a draft of ", o.draft.size(), " tokens, expected as many or none");
  for (const int32_t id : o.draft)
    INGOT_CHECK(id >= 0 && id < vocab(), "sample: found id ", id, " in a draft, expected 0 to ", vocab() - 1);
  for (const DraftRow& row : o.draft_rows) check_token_choice(row.bias, row.allowed, ids);
}

void Decoder::check_token_choice(std::span<const LogitBias> bias, std::span<const uint32_t> allowed,
                                 int64_t ids) const {
  for (const LogitBias& b : bias) {
    INGOT_CHECK(b.id >= 0 && b.id < vocab(), "sample: found a bias for id ", b.id, ", expected 0 to ", vocab() - 1);
    INGOT_CHECK(b.bias < HUGE_VALF, "sample: found a bias of ", b.bias, " for id ", b.id,
                ", expected a finite number or -infinity");
  }
  if (allowed.empty()) return;
  INGOT_CHECK(int64_t(allowed.size()) == (ids + 31) / 32, "sample: found ", allowed.size(),
              " words of allowed tokens, expected ", (ids + 31) / 32);
  bool any = false;
  for (size_t i = 0; i < allowed.size(); ++i) {
    const int64_t bits = std::min<int64_t>(32, ids - int64_t(i) * 32);
    any |= (allowed[i] & (bits == 32 ? ~0u : (1u << bits) - 1)) != 0;
  }
  INGOT_CHECK(any, "sample: found no token that is allowed, expected at least one");
}

bool Decoder::continues(Answer& a) {
  if (a.ended || a.stepped || int64_t(a.result.tokens.size()) == a.n) return false;
  if (take_cancel(a.slot))
    a.end(Finish::cancelled);
  else if (a.pending >= 0 && cached_length(a.slot) == context())
    a.end(Finish::context);
  return !a.ended;
}

// Feeds the pending tokens, together where the engine can. An error of a call ends the answers of this call.
void Decoder::feed_all(std::span<Answer* const> answers) {
  std::vector<Answer*> pending;
  std::copy_if(answers.begin(), answers.end(), std::back_inserter(pending), [](Answer* a) { return a->pending >= 0; });
  const size_t most = size_t(columns());
  for (size_t first = 0; first < pending.size(); first += most) {
    const auto group = std::span(pending).subspan(first, std::min(most, pending.size() - first));
    std::vector<PendingToken> tokens;
    for (const Answer* a : group) tokens.push_back({.id = a->pending, .next = a->next()});
    try {
      if (group.size() > 1 && feed_together(tokens)) continue;
    } catch (...) {
      for (Answer* a : group) a->end_with_error();
      continue;
    }
    for (size_t i = 0; i < group.size(); ++i) try {
        feed(tokens[i]);
      } catch (...) { group[i]->end_with_error(); }
  }
}

namespace {

// The tokens and the options of a draft step, in memory that the engine's DraftStep refers to.
struct DraftRows {
  int64_t begin = 0;  // tokens of the slot before the step
  std::vector<int32_t> ids;
  std::vector<SampleOptions> options;
  std::vector<SlotSample> samples;

  DraftRows(const SlotSample& first, int32_t pending, int64_t tokens_before, int64_t most_rows) : begin(tokens_before) {
    const SampleOptions& o = *first.options;
    const std::span<const int32_t> draft = o.draft.first(std::min(o.draft.size(), size_t(most_rows - 1)));
    ids = {pending};
    ids.insert(ids.end(), draft.begin(), draft.end());
    options.assign(ids.size(), o);
    for (size_t i = 0; i < ids.size(); ++i) {
      if (i > 0 && !o.draft_rows.empty())
        options[i].bias = o.draft_rows[i - 1].bias, options[i].allowed = o.draft_rows[i - 1].allowed;
      samples.push_back({.slot = first.slot, .options = &options[i], .step = first.step + uint32_t(i)});
    }
  }
};

}  // namespace

// Takes the steps of calls with `drafting` whose slots have pending tokens: several steps at once, as far as their
// tokens fit into draft_rows().
void Decoder::sample_drafts_of(std::span<Answer* const> answers) {
  std::vector<DraftRows> rows;
  for (Answer* a : answers)
    rows.emplace_back(a->next(), a->pending, cached_length(a->slot),
                      std::min({draft_rows(), a->n, context() - cached_length(a->slot)}));
  for (size_t first = 0, next = 0; first < answers.size(); first = next) {
    std::vector<DraftStep> steps;
    for (int64_t all = 0; next < answers.size(); ++next) {
      all += int64_t(rows[next].ids.size());
      if (!steps.empty() && all > draft_rows()) break;
      steps.push_back({rows[next].ids, rows[next].samples});
      answers[next]->result.drafted = int64_t(rows[next].ids.size()) - 1;
    }
    std::vector<std::vector<SlotSampled>> sampled(steps.size());
    try {
      sampled = sample_drafts(steps);
    } catch (...) {
      for (std::vector<SlotSampled>& s : sampled) s = {{.token = {}, .error = std::current_exception()}};
    }
    for (size_t i = 0; i < steps.size(); ++i)
      take_draft(*answers[first + i], rows[first + i].ids, rows[first + i].begin, std::move(sampled[i]));
  }
}

// Appends the sampled tokens to the answer as long as they equal the draft, and cuts the slot back to them.
void Decoder::take_draft(Answer& a, std::span<const int32_t> ids, int64_t begin, std::vector<SlotSampled> sampled) {
  const std::span<const int32_t> draft = ids.subspan(1);
  try {
    for (size_t i = 0; i < ids.size() && !a.ended; ++i) {
      if (i > 0 && take_cancel(a.slot)) {
        a.end(Finish::cancelled);
        break;
      }
      if (sampled[i].error) std::rethrow_exception(sampled[i].error);
      const int32_t token = sampled[i].token.token;
      a.append(std::move(sampled[i].token));
      if (i == draft.size() || token != draft[i]) break;
      if (a.result.stop_id < 0) ++a.result.accepted;
    }
  } catch (...) { a.end_with_error(); }
  // The slot keeps the old pending token and the sampled tokens before the new pending token; after a stop id there is
  // no pending token.
  const int64_t tokens = int64_t(a.result.tokens.size());
  const int64_t length = begin + 1 + tokens - (a.result.stop_id < 0 && tokens > 0 ? 1 : 0);
  if (const int64_t now = cached_length(a.slot); now > length) {
    const int64_t kept = truncate(a.slot, length);
    INGOT_CHECK_EQ(kept, length, "sample: tokens after a draft step");
  }
}

void Decoder::sample_next(std::span<Answer* const> all) {
  std::vector<Answer*> answers, drafted;
  for (Answer* a : all) {
    a->stepped = a->options.drafting;
    (a->stepped && a->pending >= 0 ? drafted : answers).push_back(a);
  }
  sample_drafts_of(drafted);
  feed_all(answers);
  std::vector<Answer*> fed;
  std::vector<SlotSample> samples;
  for (Answer* a : answers)
    if (!a->ended) fed.push_back(a), samples.push_back(a->next());
  if (fed.empty()) return;
  std::vector<SlotSampled> sampled;
  try {
    sampled = sample_tokens(samples);
  } catch (...) {
    for (Answer* a : fed) a->end_with_error();
    return;
  }
  for (size_t i = 0; i < fed.size(); ++i) try {
      if (sampled[i].error) std::rethrow_exception(sampled[i].error);
      fed[i]->append(std::move(sampled[i].token));  // calls on_token, which may throw
    } catch (...) { fed[i]->end_with_error(); }
}

void Decoder::sample_all(std::span<Answer> answers) {
  const size_t most = columns() == 1 ? 1 : answers.size();
  for (size_t first = 0; first < answers.size(); first += most)
    for (std::vector<Answer*> active;; active.clear()) {
      for (Answer& a : answers.subspan(first, most))
        if (continues(a)) active.push_back(&a);
      if (active.empty()) break;
      sample_next(active);
    }
  for (const Answer& a : answers) update_state(a);
}

void Decoder::update_state(const Answer& a) {
  State& s = states_[size_t(a.slot)];
  if (a.result.error || a.result.stop_id >= 0) {
    s.next = Next::nothing;
  } else if (!a.result.tokens.empty()) {
    s.next = Next::pending;
    s.pending = a.result.tokens.back();
  }
}

Sampled Decoder::sample(int slot, const SampleOptions& options, int64_t n) {
  check_sample(slot, options, n);
  const State& s = states_[size_t(slot)];
  Answer answer{.slot = slot, .options = options, .n = n, .pending = s.next == Next::pending ? s.pending : -1};
  sample_all({&answer, 1});
  if (answer.result.error) std::rethrow_exception(answer.result.error);
  return std::move(answer.result);
}

std::vector<Sampled> Decoder::sample(std::span<const Request> requests) {
  std::vector<Sampled> results(requests.size());
  std::vector<Answer> answers;
  std::vector<size_t> places;  // of the answers among the results
  for (size_t i = 0; i < requests.size(); ++i) try {
      const Request& r = requests[i];
      check_sample(r.slot, r.options, r.n);
      for (const Answer& a : answers)
        INGOT_CHECK(a.slot != r.slot, "sample: found slot ", r.slot, " twice, expected each at most once");
      const State& s = states_[size_t(r.slot)];
      answers.push_back(
          {.slot = r.slot, .options = r.options, .n = r.n, .pending = s.next == Next::pending ? s.pending : -1});
      places.push_back(i);
    } catch (...) { results[i].error = std::current_exception(); }
  if (!answers.empty()) sample_all(answers);
  for (size_t i = 0; i < answers.size(); ++i) results[places[i]] = std::move(answers[i].result);
  return results;
}

}  // namespace ingot
