#include "ingot/models/host_decoder.h"

#include <algorithm>
#include <cstring>

#include "ingot/kernels/sampling/logprobs.h"

namespace ingot {
std::vector<LogitBias> in_order(std::span<const LogitBias> bias) {
  std::vector<LogitBias> sorted(bias.begin(), bias.end());
  std::stable_sort(sorted.begin(), sorted.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return sorted;
}

int32_t draw_from(const Tensor& row, const SampleOptions& o, uint32_t step) {
  const int64_t vocab = o.vocab > 0 ? o.vocab : row.numel();
  std::vector<int32_t> ids;
  std::vector<float> biases;
  for (const LogitBias& b : in_order(o.bias)) ids.push_back(b.id), biases.push_back(b.bias);
  const int64_t n = int64_t(ids.size());
  int32_t token = 0;
  sample({.logits = Tensor(row.data, row.dtype, {1, vocab}),
          .tokens = Tensor(&token, {1}),
          .options = o.sampling,
          .seed = o.seed,
          .step = step,
          .bias_ids = n > 0 ? Tensor(ids.data(), {1, n}) : Tensor(),
          .biases = n > 0 ? Tensor(biases.data(), {1, n}) : Tensor(),
          .allowed = o.allowed.empty() ? Tensor() : Tensor(o.allowed.data(), {1, int64_t(o.allowed.size())})},
         {});
  return token;
}

TokenLogprobs logprobs_of(const Tensor& row, int64_t vocab, int32_t drawn, int64_t top) {
  std::vector<int32_t> ids(size_t(top), -1);
  std::vector<double> values(size_t(1 + top));
  logprobs({.logits = Tensor(row.data, row.dtype, {vocab}),
            .token = Tensor(&drawn, {1}),
            .top = top > 0 ? Tensor(ids.data(), {top}) : Tensor(),
            .values = Tensor(values.data(), {1 + top})},
           {});
  return logprobs_of(ids, values);
}
TokenLogprobs logprobs_of(std::span<const int32_t> top, std::span<const double> values) {
  TokenLogprobs all{.drawn = values[0]};
  for (size_t i = 0; i < top.size(); ++i) all.top.push_back({top[i], values[1 + i]});
  return all;
}

bool HostDecoder::append(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) {
  Row& kept = rows_[size_t(slot)];
  kept.is_there = rows == Rows::last && !take && extend_there(slot, ids, nullptr);
  if (!kept.is_there) tell(slot, ids, rows, take);
  return true;
}

void HostDecoder::append_together(std::span<const Part> parts) {
  extend_parts_there(parts);
  for (const Part& part : parts) rows_[size_t(part.slot)].is_there = true;
}

void HostDecoder::keep_last(int slot, const Tensor& logits) {
  Row& kept = rows_[size_t(slot)];
  const Tensor row = logits.row(logits.size(0) - 1);
  kept.dtype = row.dtype;
  kept.bytes.resize(size_t(row.bytes()));
  std::memcpy(kept.bytes.data(), row.data, kept.bytes.size());
}

// Keeps the last token's logits on the way to `take`.
void HostDecoder::tell(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) {
  const int64_t last = held(slot) + int64_t(ids.size()) - 1;
  extend_slot(slot, ids, rows, [&](int64_t position, const Tensor& logits) {
    if (position + logits.size(0) - 1 == last) keep_last(slot, logits);
    if (take) take(position, logits);
  });
}

Tensor HostDecoder::row(int slot) {
  Row& kept = rows_[size_t(slot)];
  return Tensor(kept.bytes.data(), kept.dtype, {vocab()});
}

SampledToken HostDecoder::token_from(int slot, const SampleOptions& o, uint32_t step, bool goes_on) {
  Row& kept = rows_[size_t(slot)];
  if (kept.is_there) {
    if (samples_on_device(o)) {
      const SlotSample one{.slot = slot, .options = &o, .step = step, .goes_on = goes_on};
      SlotSampled found = std::move(sample_on_device({&one, 1})[0]);
      if (found.error) std::rethrow_exception(found.error);
      return std::move(found.token);
    }
    bring_there(slot, [&](int64_t, const Tensor& logits) { keep_last(slot, logits); });
    kept.is_there = false;
  }
  SampledToken drawn{.token = draw_from(row(slot), o, step)};
  if (o.logprobs >= 0) drawn.logprobs = logprobs_of(row(slot), drawable(o), drawn.token, o.logprobs);
  return drawn;
}

bool HostDecoder::goes_on(Progress& p) {
  if (p.ended || int64_t(p.drawn.tokens.size()) == p.n) return false;
  if (cancelled(p.slot))
    p.drawn.finish = Finish::cancelled;
  else if (p.waiting >= 0 && held(p.slot) == context())
    p.drawn.finish = Finish::context;
  else
    return true;
  return !(p.ended = true);
}

void HostDecoder::tell_waiting(Progress& p) {
  if (p.waiting < 0) return;
  Row& kept = rows_[size_t(p.slot)];
  const SlotSample next{.slot = p.slot, .options = &p.options, .step = step_of(p)};
  kept.is_there = extend_there(p.slot, {&p.waiting, 1}, &next);
  if (!kept.is_there) tell(p.slot, {&p.waiting, 1}, Rows::last, {});
}

void HostDecoder::sample_next(Progress& p) {
  const SampleOptions& o = p.options;
  SampledToken sampled;
  if (p.waiting >= 0 && !p.told && o.bias.empty() && o.allowed.empty() && o.logprobs < 0)
    sampled.token = drawn_after(p.slot, p.waiting, drawable(o), o.sampling, o.seed, step_of(p));
  if (sampled.token < 0) {
    if (!p.told) tell_waiting(p);
    sampled = token_from(p.slot, o, step_of(p), p.n - int64_t(p.drawn.tokens.size()) > 1);
  }
  take(p, std::move(sampled));
}

// p ends with the token, or the token waits.
void HostDecoder::take(Progress& p, SampledToken drawn) {
  const SampleOptions& o = p.options;
  p.told = false;
  if (std::find(o.stop_ids.begin(), o.stop_ids.end(), drawn.token) != o.stop_ids.end()) {
    p.drawn.finish = Finish::stop;
    p.drawn.stop_id = drawn.token;
    p.ended = true;
    return;
  }
  p.drawn.tokens.push_back(drawn.token);
  if (o.logprobs >= 0) p.drawn.logprobs.push_back(std::move(drawn.logprobs));
  p.waiting = drawn.token;
  if (o.on_token && !o.on_token(drawn.token)) {
    p.drawn.finish = Finish::cancelled;
    p.ended = true;
  }
}

Sampled HostDecoder::sample_one(int slot, int32_t waiting, const SampleOptions& o, int64_t n) {
  Progress p{.slot = slot, .options = o, .n = n, .waiting = waiting};
  while (goes_on(p)) sample_next(p);
  return std::move(p.drawn);
}

void HostDecoder::tell_together(std::span<Progress*> of) {
  std::vector<int> slots;
  std::vector<int32_t> ids;
  for (const Progress* p : of) slots.push_back(p->slot), ids.push_back(p->waiting);
  if (!extend_together(slots, ids, drawable(of[0]->options))) return;
  for (Progress* p : of) p->told = rows_[size_t(p->slot)].is_there = true;
}

namespace {
// An error of the call ends the request.
template <class Progress, class Call> void attempt(Progress& p, Call&& call) {
  try {
    call();
  } catch (...) {
    p.drawn.error = std::current_exception();
    p.ended = true;
  }
}
}  // namespace

// Samples the next token, in a single call, for the slots with logits on the engine's device or with a pending token
// that the device can sample; the remaining slots keep their logits for sample_next().
void HostDecoder::sample_together(std::span<Progress*> of) {
  std::vector<Progress*> there;
  std::vector<SlotSample> requests;
  for (Progress* p : of) {
    if (p->ended || !samples_on_device(p->options)) continue;
    if (p->waiting >= 0 && !p->told) attempt(*p, [&] { tell_waiting(*p), p->told = true; });
    if (p->ended || !rows_[size_t(p->slot)].is_there) continue;
    there.push_back(p);
    requests.push_back({.slot = p->slot, .options = &p->options, .step = step_of(*p)});
  }
  if (there.empty()) return;
  std::vector<SlotSampled> found;
  try {
    found = sample_on_device(requests);
  } catch (...) {
    for (Progress* p : there) p->drawn.error = std::current_exception(), p->ended = true;
    return;
  }
  for (size_t i = 0; i < there.size(); ++i)
    attempt(*there[i], [&] {
      if (found[i].error) std::rethrow_exception(found[i].error);
      take(*there[i], std::move(found[i].token));
      there[i]->sampled = true;
    });
}

// Samples a token of each slot at a time; pending tokens are fed together.
std::vector<Sampled> HostDecoder::sample_all(std::span<const Request> requests, std::span<const int32_t> waiting) {
  if (columns() == 1 || requests.size() == 1) return Decoder::sample_all(requests, waiting);
  std::vector<Progress> all;
  for (size_t i = 0; i < requests.size(); ++i)
    all.push_back(
        {.slot = requests[i].slot, .options = requests[i].options, .n = requests[i].n, .waiting = waiting[i]});
  for (bool any = true; any;) {
    std::vector<Progress*> on, told;
    for (Progress& p : all)
      if (goes_on(p)) on.push_back(&p);
    any = !on.empty();
    for (Progress* p : on)
      if (p->waiting >= 0) told.push_back(p);
    const size_t most = size_t(columns());
    for (size_t at = 0; at < told.size(); at += most) {
      const auto part = std::span(told).subspan(at, std::min(most, told.size() - at));
      if (part.size() == 1) continue;
      try {
        tell_together(part);
      } catch (...) {
        for (Progress* p : part) p->drawn.error = std::current_exception(), p->ended = true;
      }
    }
    sample_together(on);
    for (Progress* p : on)
      if (!std::exchange(p->sampled, false) && !p->ended) attempt(*p, [&] { sample_next(*p); });
  }
  std::vector<Sampled> drawn;
  for (Progress& p : all) drawn.push_back(std::move(p.drawn));
  return drawn;
}

}  // namespace ingot
