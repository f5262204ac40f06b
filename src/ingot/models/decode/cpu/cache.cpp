#include "ingot/models/decode/cpu/cache.h"

#include <algorithm>

#include "ingot/kernels/copy/copy.h"

namespace ingot::decode {
namespace {

int64_t ring_rows_of(const DecoderSpec& c, int64_t capacity, int64_t batch) {
  return std::min(capacity, c.longest_window() - 1 + batch);
}
// The number of tokens that a snapshot keeps in addition to the window, because the next turn of a conversation may
// replace the last few tokens.
constexpr int64_t kStepsBack = 8;

}  // namespace

int64_t KeyValueCache::bytes(const DecoderSpec& c, int64_t layers, int64_t capacity, int64_t batch) {
  int64_t total = 0;
  for (int64_t l = 0; l < layers; ++l) {
    const int64_t rows = c.layer[size_t(l)].window > 0 ? ring_rows_of(c, capacity, batch) : capacity;
    total += 2 * Arena::aligned(rows * c.kv_width() * 4);
  }
  return total;
}

KeyValueCache::KeyValueCache(const DecoderSpec& c, int64_t layers, int64_t capacity, int64_t batch, Allocator& memory)
    : allocator_(&memory),
      arena_(bytes(c, layers, capacity, batch), memory),
      capacity_(capacity),
      batch_(batch),
      window_(c.longest_window()) {
  INGOT_CHECK(capacity >= 1 && batch >= 1, "decode: found a cache of ", capacity, " tokens in batches of ", batch,
              ", expected at least 1 of each");
  for (int64_t l = 0; l < layers; ++l) {
    ring_.push_back(c.layer[size_t(l)].window > 0);
    const int64_t rows = ring_.back() ? ring_rows_of(c, capacity, batch) : capacity;
    keys_.push_back(arena_.take(DType::f32, {rows, c.kv_heads, c.head_dim}));
    values_.push_back(arena_.take(DType::f32, {rows, c.kv_heads, c.head_dim}));
  }
}

void KeyValueCache::advance(int64_t tokens) {
  length_ += tokens;
  if (window_ > 0) valid_from_ = std::max(valid_from_, length_ - std::min(capacity_, window_ - 1 + batch_));
}

bool KeyValueCache::can_rewind(int64_t length) const {
  return 0 <= length && length <= length_ &&
         (length == 0 || std::max<int64_t>(0, length - (window_ - 1)) >= valid_from_);
}

void KeyValueCache::rewind(int64_t length) {
  INGOT_CHECK(can_rewind(length), "decode: found a cache of ", length_, " tokens that cannot go back to ", length);
  length_ = length;
  if (length == 0) valid_from_ = 0;
}

// Copies the rows of positions begin to end of a circular cache, which are one or two contiguous ranges, to or from
// contiguous rows.
void KeyValueCache::copy_windows(const Snapshot& s, bool out) const {
  for (size_t l = 0, k = 0; l < keys_.size(); ++l) {
    if (!ring_[l]) continue;
    for (const Tensor* ring : {&keys_[l], &values_[l]}) {
      const int64_t rows = ring->size(0);
      for (int64_t p = s.begin; p < s.length;) {
        const int64_t n = std::min(s.length - p, rows - p % rows);
        const Tensor there = ring->slice(0, p % rows, p % rows + n),
                     here = s.windows[k].slice(0, p - s.begin, p - s.begin + n);
        out ? copy({.from = there, .to = here}, {}) : copy({.from = here, .to = there}, {});
        p += n;
      }
      ++k;
    }
  }
}

KeyValueCache::Snapshot KeyValueCache::snapshot() const {
  Snapshot s{.length = length_, .begin = std::max(valid_from_, length_ - (window_ - 1) - kStepsBack)};
  int64_t bytes = 0;
  const auto each = [&](const auto& visit) {
    for (size_t l = 0; l < keys_.size(); ++l)
      if (ring_[l])
        for (const Tensor* ring : {&keys_[l], &values_[l]})
          visit(ring->dtype, Shape{s.length - s.begin, ring->size(1), ring->size(2)});
  };
  each([&](DType t, const Shape& shape) { bytes += Arena::aligned(t, shape); });
  if (bytes == 0) return s;
  s.memory = Arena(bytes, *allocator_);
  each([&](DType t, const Shape& shape) { s.windows.push_back(s.memory.take(t, shape)); });
  copy_windows(s, true);
  return s;
}

bool KeyValueCache::leads_to(const Snapshot& s, int64_t length) const {
  return length <= s.length && std::max<int64_t>(0, length - (window_ - 1)) >= s.begin;
}

void KeyValueCache::restore(const Snapshot& s) {
  copy_windows(s, false);
  length_ = s.length;
  valid_from_ = s.begin;
}

void KeyValueCache::copy_from(const KeyValueCache& from, int64_t length) {
  INGOT_CHECK(from.can_rewind(length), "decode: found a cache of ", from.length_,
              " tokens that lacks keys of the first ", length);
  const int64_t begin = window_ > 0 ? std::max<int64_t>(0, length - (window_ - 1)) : 0;
  for (size_t l = 0; l < keys_.size(); ++l) {
    const int64_t rows = keys_[l].size(0);
    for (int64_t p = ring_[l] ? begin : 0; p < length;) {  // a circular cache has one or two contiguous ranges of rows
      const int64_t n = std::min(length - p, rows - p % rows);
      const auto part = [&](const Tensor& t) { return t.slice(0, p % rows, p % rows + n); };
      copy({.from = part(from.keys_[l]), .to = part(keys_[l])}, {});
      copy({.from = part(from.values_[l]), .to = part(values_[l])}, {});
      p += n;
    }
  }
  length_ = length;
  valid_from_ = begin;
}

}  // namespace ingot::decode
