#include "ingot/models/decoder.h"

#include <algorithm>
#include <cmath>

namespace ingot {

const char* name_of(Finish f) {
  switch (f) {
    case Finish::stop: return "stop";
    case Finish::length: return "length";
    case Finish::context: return "context";
    case Finish::cancelled: return "cancelled";
  }
  return "?";
}

Decoder::Decoder(int64_t slots) : states_(size_t(std::max<int64_t>(0, slots))) {
  INGOT_CHECK(slots >= 1 && slots <= INT32_MAX, "decoder: found ", slots, " slots, expected at least 1");
}

Decoder::State& Decoder::state(int slot) {
  INGOT_CHECK(slot >= 0 && slot < slots() && states_[size_t(slot)].open, "decoder: found slot ", slot,
              ", expected one that is open");
  return states_[size_t(slot)];
}

int64_t Decoder::open_slots() const {
  return std::count_if(states_.begin(), states_.end(), [](const State& s) { return s.open; });
}

int Decoder::open() {
  const auto free = std::find_if(states_.begin(), states_.end(), [](const State& s) { return !s.open; });
  if (free == states_.end())
    fail(ErrorCode::busy, "decoder: found all ", slots(), " slots in use, expected one to be free");
  const int slot = int(free - states_.begin());
  free->open = true;
  free->beyond = Beyond::nothing;
  free->cancel = false;
  start(slot);
  return slot;
}

void Decoder::close(int slot) {
  State& s = state(slot);
  s.open = false;
  s.cancel = false;
}

int64_t Decoder::length(int slot) const {
  const_cast<Decoder*>(this)->state(slot);
  return held(slot);
}

void Decoder::check_extend(int slot, std::span<const int32_t> ids) {
  state(slot);
  const int64_t n = int64_t(ids.size()), begin = held(slot);
  INGOT_CHECK(n >= 1 && n <= batch(), "decoder: found ", n, " tokens to append, expected 1 to ", batch());
  if (begin + n > context())
    fail(ErrorCode::usage, "found ", begin + n, " tokens, expected at most ", context(), ", the context");
  for (int64_t t = 0; t < n; ++t)
    INGOT_CHECK(ids[size_t(t)] >= 0 && ids[size_t(t)] < vocab(), "decoder: found id ", ids[size_t(t)], " at position ",
                begin + t, ", expected 0 to ", vocab() - 1);
}

bool Decoder::extend(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) {
  check_extend(slot, ids);
  State& s = state(slot);
  s.beyond = Beyond::nothing;
  if (cancelled(slot) || !append(slot, ids, rows, take)) return false;
  s.beyond = Beyond::logits;
  return true;
}

std::vector<bool> Decoder::extend(std::span<const Part> parts) {
  int64_t tokens = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    check_extend(parts[i].slot, parts[i].ids);
    tokens += int64_t(parts[i].ids.size());
    for (size_t j = 0; j < i; ++j)
      INGOT_CHECK(parts[j].slot != parts[i].slot, "decoder: found slot ", parts[i].slot,
                  " twice, expected each at most once");
  }
  INGOT_CHECK(tokens <= batch(), "decoder: found ", tokens, " tokens to append, expected at most ", batch());
  std::vector<bool> appended(parts.size());
  std::vector<Part> left;
  for (size_t i = 0; i < parts.size(); ++i) {
    states_[size_t(parts[i].slot)].beyond = Beyond::nothing;
    if (!extends_together() || parts.size() == 1) {
      appended[i] = extend(parts[i].slot, parts[i].ids);
      continue;
    }
    appended[i] = !cancelled(parts[i].slot);
    if (appended[i]) left.push_back(parts[i]);
  }
  if (left.size() == 1)
    append(left[0].slot, left[0].ids, Rows::last, {});
  else if (!left.empty())
    append_together(left);
  for (const Part& part : left) states_[size_t(part.slot)].beyond = Beyond::logits;
  return appended;
}

int64_t Decoder::copy_prefix(int from, int to, int64_t length) {
  state(from);
  State& s = state(to);
  INGOT_CHECK(from != to && length >= 1 && length <= held(from), "decoder: found ", length, " tokens of slot ", from,
              " to copy to slot ", to, ", expected 1 to ", held(from), " and another slot");
  if (!copy_tokens(from, to, length)) return 0;
  s.beyond = Beyond::nothing;
  return length;
}

int64_t Decoder::rewind(int slot, int64_t length) {
  State& s = state(slot);
  INGOT_CHECK(length >= 0 && length <= held(slot), "decoder: found a length of ", length,
              " to go back to, expected 0 to ", held(slot));
  s.beyond = Beyond::nothing;
  return cut(slot, length);
}

void Decoder::mark(int slot) {
  state(slot);
  keep(slot);
}

std::string Decoder::trace(int slot) {
  State& s = state(slot);
  if (!traces())
    fail(ErrorCode::unsupported, "trace: found an engine on ", device(), " that keeps no times of a token");
  if (held(slot) >= context())
    fail(ErrorCode::usage, "trace: found ", held(slot), " tokens, a full context, expected room for one more");
  if (s.beyond == Beyond::logits) s.beyond = Beyond::nothing;  // the ids of the softmax
  return trace_of(slot);
}

void Decoder::check_sample(int slot, const SampleOptions& o, int64_t n) {
  INGOT_CHECK(state(slot).beyond != Beyond::nothing, "sample: found slot ", slot,
              " without logits or a waiting token, expected extend() before");
  INGOT_CHECK(n >= 1, "sample: found ", n, " tokens, expected at least 1");
  check(o.sampling);
  INGOT_CHECK(o.vocab >= 0 && o.vocab <= vocab(), "sample: found a vocabulary of ", o.vocab, ", expected at most ",
              vocab(), ", the model's");
  const int64_t drawable = o.vocab > 0 ? o.vocab : vocab();
  INGOT_CHECK(o.logprobs >= -1 && o.logprobs <= drawable, "sample: found logprobs of ", o.logprobs,
              " tokens, expected -1 (none) to ", drawable, ", the vocabulary");
  for (const LogitBias& b : o.bias) {
    INGOT_CHECK(b.id >= 0 && b.id < vocab(), "sample: found a bias for id ", b.id, ", expected 0 to ", vocab() - 1);
    INGOT_CHECK(b.bias < HUGE_VALF, "sample: found a bias of ", b.bias, " for id ", b.id,
                ", expected a finite number or -infinity");
  }
  if (o.allowed.empty()) return;
  INGOT_CHECK(int64_t(o.allowed.size()) == (drawable + 31) / 32, "sample: found ", o.allowed.size(),
              " words of allowed tokens, expected ", (drawable + 31) / 32);
  bool any = false;
  for (size_t i = 0; i < o.allowed.size(); ++i) {
    const int64_t bits = std::min<int64_t>(32, drawable - int64_t(i) * 32);
    any |= (o.allowed[i] & (bits == 32 ? ~0u : (1u << bits) - 1)) != 0;
  }
  INGOT_CHECK(any, "sample: found no token that is allowed, expected at least one");
}

// Updates the slot's logits and pending token after a sample.
void Decoder::settle(int slot, const Sampled& d) {
  State& s = states_[size_t(slot)];
  if (d.error || d.stop_id >= 0) {
    s.beyond = Beyond::nothing;
  } else if (!d.tokens.empty()) {
    s.beyond = Beyond::waiting;
    s.waiting = d.tokens.back();
  }
}

Sampled Decoder::sample(int slot, const SampleOptions& options, int64_t n) {
  check_sample(slot, options, n);
  State& s = states_[size_t(slot)];
  Sampled d;
  try {
    d = sample_one(slot, s.beyond == Beyond::waiting ? s.waiting : -1, options, n);
  } catch (...) {
    s.beyond = Beyond::nothing;
    throw;
  }
  settle(slot, d);
  return d;
}

std::vector<Sampled> Decoder::sample(std::span<const Request> requests) {
  std::vector<Sampled> all(requests.size());
  std::vector<Request> good;
  std::vector<int32_t> waiting;
  std::vector<size_t> places;
  for (size_t i = 0; i < requests.size(); ++i) {
    const Request& r = requests[i];
    try {
      check_sample(r.slot, r.options, r.n);
      for (const Request& other : good)
        INGOT_CHECK(other.slot != r.slot, "sample: found slot ", r.slot, " twice, expected each at most once");
    } catch (...) {
      all[i].error = std::current_exception();
      continue;
    }
    const State& s = states_[size_t(r.slot)];
    good.push_back(r);
    waiting.push_back(s.beyond == Beyond::waiting ? s.waiting : -1);
    places.push_back(i);
  }
  std::vector<Sampled> sampled = sample_all(good, waiting);
  for (size_t i = 0; i < good.size(); ++i) {
    settle(good[i].slot, sampled[i]);
    all[places[i]] = std::move(sampled[i]);
  }
  return all;
}

std::vector<Sampled> Decoder::sample_all(std::span<const Request> requests, std::span<const int32_t> waiting) {
  std::vector<Sampled> all(requests.size());
  for (size_t i = 0; i < requests.size(); ++i) try {
      all[i] = sample_one(requests[i].slot, waiting[i], requests[i].options, requests[i].n);
    } catch (...) { all[i].error = std::current_exception(); }
  return all;
}

void Decoder::cancel(int slot) noexcept {
  if (slot >= 0 && slot < slots()) states_[size_t(slot)].cancel.store(true, std::memory_order_relaxed);
}

}  // namespace ingot
