#include "ingot/models/host_decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "ingot/core/dispatch.h"

namespace ingot {
namespace {

bool is_allowed(std::span<const uint32_t> allowed, int64_t id) {
  return (allowed[size_t(id / 32)] >> (id % 32) & 1) != 0;
}

template <class T> void adjust(T* row, int64_t vocab, const DrawOptions& o) {
  for (const LogitBias& b : o.bias)
    if (b.id < vocab) row[b.id] += T(b.bias);
  if (o.allowed.empty()) return;
  for (int64_t v = 0; v < vocab; ++v)
    if (!is_allowed(o.allowed, v)) row[v] = -std::numeric_limits<T>::infinity();
}

template <class T> TokenLogprobs logprobs(const T* row, int64_t vocab, int32_t drawn, int64_t top) {
  const double high = double(*std::max_element(row, row + vocab));
  double sum = 0;
  for (int64_t v = 0; v < vocab; ++v) sum += std::exp(double(row[v]) - high);
  const double log_sum = std::log(sum) + high;
  TokenLogprobs result{.drawn = double(row[drawn]) - log_sum};
  std::vector<int32_t> order(static_cast<size_t>(vocab));
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + top, order.end(),
                    [&](int32_t a, int32_t b) { return row[a] != row[b] ? row[a] > row[b] : a < b; });
  for (int64_t i = 0; i < top; ++i) result.top.push_back({order[size_t(i)], double(row[order[size_t(i)]]) - log_sum});
  return result;
}

}  // namespace

int32_t draw_from(const Tensor& row, const DrawOptions& o, uint32_t step) {
  const int64_t vocab = o.vocab > 0 ? o.vocab : row.numel();
  std::vector<char> changed;
  void* logits = row.data;
  if (!o.bias.empty() || !o.allowed.empty()) {
    changed.resize(size_t(vocab * size_of(row.dtype)));
    std::memcpy(changed.data(), row.data, changed.size());
    logits = changed.data();
    if (row.dtype == DType::f64)
      adjust(static_cast<double*>(logits), vocab, o);
    else
      adjust(static_cast<float*>(logits), vocab, o);
  }
  int32_t token = 0;
  sample({.logits = Tensor(logits, row.dtype, {1, vocab}),
          .tokens = Tensor(&token, {1}),
          .options = o.sampling,
          .seed = o.seed,
          .step = step},
         {});
  return token;
}

TokenLogprobs logprobs_of(const Tensor& row, int64_t vocab, int32_t drawn, int64_t top) {
  return row.dtype == DType::f64 ? logprobs(row.ptr<double>(), vocab, drawn, top)
                                 : logprobs(row.ptr<float>(), vocab, drawn, top);
}

bool HostDecoder::append(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) {
  tell(slot, ids, rows, take);
  return true;
}

// Keeps the last token's logits on the way to `take`.
void HostDecoder::tell(int slot, std::span<const int32_t> ids, Rows rows, const Take& take) {
  const int64_t last = held(slot) + int64_t(ids.size()) - 1;
  Row& kept = rows_[size_t(slot)];
  extend_slot(slot, ids, rows, [&](int64_t position, const Tensor& logits) {
    const int64_t n = logits.size(0);
    if (position + n - 1 == last) {
      const Tensor row = logits.row(n - 1);
      kept.dtype = row.dtype;
      kept.bytes.resize(size_t(row.bytes()));
      std::memcpy(kept.bytes.data(), row.data, kept.bytes.size());
    }
    if (take) take(position, logits);
  });
}

Tensor HostDecoder::row(int slot) {
  Row& kept = rows_[size_t(slot)];
  return Tensor(kept.bytes.data(), kept.dtype, {vocab()});
}

// Tells the token that waits, if one does, and draws the next.
int32_t HostDecoder::token_after(int slot, int32_t waiting, const DrawOptions& o, uint32_t step) {
  if (waiting >= 0) {
    const int64_t drawable = o.vocab > 0 ? o.vocab : vocab();
    if (o.bias.empty() && o.allowed.empty() && o.logprobs < 0)
      if (const int32_t token = drawn_after(slot, waiting, drawable, o.sampling, o.seed, step); token >= 0)
        return token;
    tell(slot, {&waiting, 1}, Rows::last, {});
  }
  return draw_from(row(slot), o, step);
}

Drawn HostDecoder::draw_one(int slot, int32_t waiting, const DrawOptions& o, int64_t n) {
  Drawn d;
  const int64_t drawable = o.vocab > 0 ? o.vocab : vocab();
  for (int64_t i = 0; i < n; ++i) {
    if (cancelled(slot)) {
      d.finish = Finish::cancelled;
      break;
    }
    if (waiting >= 0) {
      if (held(slot) == context()) {
        d.finish = Finish::context;
        break;
      }
    }
    const int32_t token = token_after(slot, waiting, o, o.step + uint32_t(i));
    if (std::find(o.stop_ids.begin(), o.stop_ids.end(), token) != o.stop_ids.end()) {
      d.finish = Finish::stop;
      d.stop_id = token;
      break;
    }
    d.tokens.push_back(token);
    if (o.logprobs >= 0) d.logprobs.push_back(logprobs_of(row(slot), drawable, token, o.logprobs));
    waiting = token;
    if (o.on_token && !o.on_token(token)) {
      d.finish = Finish::cancelled;
      break;
    }
  }
  return d;
}

}  // namespace ingot
