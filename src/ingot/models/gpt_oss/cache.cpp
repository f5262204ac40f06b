#include <algorithm>

#include "ingot/models/gpt_oss/gpt_oss.h"

namespace ingot {
namespace {

int64_t ring_rows_of(const GptOssConfig& c, int64_t capacity, int64_t batch) {
  return std::min(capacity, c.window - 1 + batch);
}
// A conversation goes on with somebody else's turn where an answer had begun: a little before the place it began at.
constexpr int64_t kStepsBack = 8;

}  // namespace

int64_t GptOssCache::bytes(const GptOssConfig& c, int64_t layers, int64_t capacity, int64_t batch) {
  int64_t total = 0;
  for (int64_t l = 0; l < layers; ++l) {
    const int64_t rows = c.sliding[size_t(l)] ? ring_rows_of(c, capacity, batch) : capacity;
    total += 2 * Arena::aligned(rows * c.kv_width() * 4);
  }
  return total;
}

GptOssCache::GptOssCache(const GptOssConfig& c, int64_t layers, int64_t capacity, int64_t batch)
    : arena_(bytes(c, layers, capacity, batch)),
      capacity_(capacity),
      batch_(batch),
      window_(c.window),
      sliding_(c.sliding) {
  INGOT_CHECK(capacity >= 1 && batch >= 1, "gpt-oss: found a cache of ", capacity, " tokens in batches of ", batch,
              ", expected at least 1 of each");
  for (int64_t l = 0; l < layers; ++l) {
    const int64_t rows = sliding_[size_t(l)] ? ring_rows_of(c, capacity, batch) : capacity;
    keys_.push_back(arena_.take(DType::f32, {rows, c.kv_heads, c.head_dim}));
    values_.push_back(arena_.take(DType::f32, {rows, c.kv_heads, c.head_dim}));
  }
}

void GptOssCache::advance(int64_t tokens) {
  length_ += tokens;
  valid_from_ = std::max(valid_from_, length_ - std::min(capacity_, window_ - 1 + batch_));
}

bool GptOssCache::can_rewind(int64_t length) const {
  return 0 <= length && length <= length_ &&
         (length == 0 || std::max<int64_t>(0, length - (window_ - 1)) >= valid_from_);
}

void GptOssCache::rewind(int64_t length) {
  INGOT_CHECK(can_rewind(length), "gpt-oss: found a cache of ", length_, " tokens that cannot go back to ", length);
  length_ = length;
  if (length == 0) valid_from_ = 0;
}

GptOssCache::Snapshot GptOssCache::snapshot() const {
  Snapshot s{.length = length_, .begin = std::max(valid_from_, length_ - (window_ - 1) - kStepsBack)};
  for (size_t l = 0; l < keys_.size(); ++l)
    if (sliding_[l])
      for (const Tensor* t : {&keys_[l], &values_[l]})
        for (int64_t p = s.begin; p < length_; ++p) {
          const float* row = t->ptr<float>() + p % t->size(0) * t->step(0);
          s.windows.insert(s.windows.end(), row, row + t->step(0));
        }
  return s;
}

bool GptOssCache::leads_to(const Snapshot& s, int64_t length) const {
  return length <= s.length && std::max<int64_t>(0, length - (window_ - 1)) >= s.begin;
}

void GptOssCache::restore(const Snapshot& s) {
  const float* from = s.windows.data();
  for (size_t l = 0; l < keys_.size(); ++l)
    if (sliding_[l])
      for (const Tensor* t : {&keys_[l], &values_[l]})
        for (int64_t p = s.begin; p < s.length; ++p, from += t->step(0))
          std::copy_n(from, t->step(0), t->ptr<float>() + p % t->size(0) * t->step(0));
  length_ = s.length;
  valid_from_ = s.begin;
}

}  // namespace ingot
