#include "ingot/models/decoder.h"

#include <algorithm>

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
  free->next = Next::nothing;
  free->cancel = false;
  clear(slot);
  return slot;
}

void Decoder::close(int slot) {
  State& s = state(slot);
  s.open = false;
  s.cancel = false;
}

int64_t Decoder::length(int slot) const {
  const_cast<Decoder*>(this)->state(slot);
  return cached_length(slot);
}

void Decoder::check_extend(int slot, std::span<const int32_t> ids) {
  state(slot);
  const int64_t n = int64_t(ids.size()), begin = cached_length(slot);
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
  s.next = Next::nothing;
  if (take_cancel(slot)) return false;
  append(slot, ids, rows, take);
  s.next = Next::logits;
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
    states_[size_t(parts[i].slot)].next = Next::nothing;
    if (!extends_together() || parts.size() == 1) {
      appended[i] = extend(parts[i].slot, parts[i].ids);
      continue;
    }
    appended[i] = !take_cancel(parts[i].slot);
    if (appended[i]) left.push_back(parts[i]);
  }
  if (left.size() == 1)
    append(left[0].slot, left[0].ids, Rows::last, {});
  else if (!left.empty())
    append_together(left);
  for (const Part& part : left) states_[size_t(part.slot)].next = Next::logits;
  return appended;
}

int64_t Decoder::copy_prefix(int from, int to, int64_t length) {
  state(from);
  State& s = state(to);
  INGOT_CHECK(from != to && length >= 1 && length <= cached_length(from), "decoder: found ", length, " tokens of slot ",
              from, " to copy to slot ", to, ", expected 1 to ", cached_length(from), " and another slot");
  if (!copy_tokens(from, to, length)) return 0;
  s.next = Next::nothing;
  return length;
}

int64_t Decoder::rewind(int slot, int64_t length) {
  State& s = state(slot);
  INGOT_CHECK(length >= 0 && length <= cached_length(slot), "decoder: found a length of ", length,
              " to go back to, expected 0 to ", cached_length(slot));
  s.next = Next::nothing;
  return truncate(slot, length);
}

void Decoder::checkpoint(int slot) {
  state(slot);
  save_checkpoint(slot);
}

std::vector<int32_t> Decoder::guess(int slot, int64_t most) {
  const State& s = state(slot);
  most = std::min(most, context() - cached_length(slot) - 1);
  if (!has_draft_head() || s.next != Next::pending || most < 1) return {};
  return guess_after(slot, s.pending, most);
}

std::string Decoder::trace(int slot) {
  State& s = state(slot);
  if (!traces())
    fail(ErrorCode::unsupported, "trace: found an engine on ", device(), " that keeps no times of a token");
  if (cached_length(slot) >= context())
    fail(ErrorCode::usage, "trace: found ", cached_length(slot), " tokens, a full context, expected room for one more");
  if (s.next == Next::logits) s.next = Next::nothing;  // the traced token overwrites the logits of the last one
  return trace_token(slot);
}

void Decoder::cancel(int slot) noexcept {
  if (slot >= 0 && slot < slots()) states_[size_t(slot)].cancel.store(true, std::memory_order_relaxed);
}

}  // namespace ingot
