#include "ingot/engines/generate/accuracy.h"

#include <algorithm>
#include <cmath>

namespace ingot {
namespace {

// log(sum exp(logits))
double log_sum(const float* logits, int64_t vocab) {
  const double top = *std::max_element(logits, logits + vocab);
  double sum = 0;
  for (int64_t v = 0; v < vocab; ++v) sum += std::exp(double(logits[v]) - top);
  return std::log(sum) + top;
}

// The kMost likeliest ids, likeliest first.
constexpr int kMost = 10;
struct Top {
  int32_t ids[kMost] = {};
  int count = 0;
  Top(const float* logits, int64_t vocab) {
    for (int64_t v = 0; v < vocab; ++v) {
      int at = count;
      while (at > 0 && logits[v] > logits[ids[at - 1]]) --at;
      if (at == kMost) continue;
      if (count < kMost) ++count;
      for (int i = count - 1; i > at; --i) ids[i] = ids[i - 1];
      ids[at] = int32_t(v);
    }
  }
  double overlap(const Top& other, int n) const {
    const int used = std::min(n, count);
    int same = 0;
    for (int i = 0; i < used; ++i) same += std::find(other.ids, other.ids + used, ids[i]) != other.ids + used;
    return double(same) / used;
  }
};

}  // namespace

void AccuracyMeter::add(const float* p, const float* q, int64_t vocab, int32_t next) {
  const double p_sum = log_sum(p, vocab), q_sum = log_sum(q, vocab);
  const Top p_top(p, vocab), q_top(q, vocab);
  const int32_t best = p_top.ids[0];
  double kl = 0, pp = 0, qq = 0, pq = 0;
  int64_t rank = 1;
  for (int64_t v = 0; v < vocab; ++v) {
    const double log_p = p[v] - p_sum;
    kl += std::exp(log_p) * (log_p - (q[v] - q_sum));
    pp += double(p[v]) * p[v], qq += double(q[v]) * q[v], pq += double(p[v]) * q[v];
    rank += q[v] > q[best] || (q[v] == q[best] && v < best);
  }
  const bool same = q_top.ids[0] == best;
  ++sum_.tokens;
  sum_.reference_loss += p_sum - p[next];
  sum_.loss += q_sum - q[next];
  sum_.top1 += same;
  if (p[best] - p_sum >= std::log(kConfident)) {
    ++sum_.confident;
    confident_same_ += same;
  }
  sum_.top5 += p_top.overlap(q_top, 5);
  sum_.top10 += p_top.overlap(q_top, 10);
  sum_.kl += kl;
  sum_.cosine += pp > 0 && qq > 0 ? pq / std::sqrt(pp * qq) : double(pp == qq);
  sum_.mean_rank += double(rank);
}

Accuracy AccuracyMeter::result() const {
  Accuracy a = sum_;
  const double n = double(std::max<int64_t>(1, a.tokens));
  for (double* mean : {&a.loss, &a.reference_loss, &a.top1, &a.top5, &a.top10, &a.kl, &a.cosine, &a.mean_rank})
    *mean /= n;
  a.confident_top1 = a.confident > 0 ? double(confident_same_) / double(a.confident) : 1;
  return a;
}

Accuracy compare_models(Decoder& reference, Decoder& other, const std::vector<std::vector<int32_t>>& lists,
                        const std::function<bool()>& cancelled) {
  INGOT_CHECK(other.vocab() == reference.vocab(), "accuracy: found a vocabulary of ", other.vocab(),
              " tokens, expected the reference's ", reference.vocab());
  const int64_t vocab = reference.vocab();
  AccuracyMeter meter;
  std::vector<float> kept;
  for (const std::vector<int32_t>& ids : lists) {
    for (size_t i = 0; i < ids.size(); ++i)
      if (ids[i] < 0 || ids[i] >= vocab)
        fail(ErrorCode::bad_data, "found id ", ids[i], " at position ", i, ", expected 0 to ", vocab - 1);
    Sequence one(reference), two(other);
    const int64_t n = int64_t(ids.size());
    for (int64_t at = 0; at + 1 < n;) {
      if (cancelled && cancelled()) fail(ErrorCode::interrupted, "stopped by a signal");
      const int64_t count = std::min({reference.batch(), other.batch(), n - at});
      const std::span<const int32_t> batch = std::span(ids).subspan(size_t(at), size_t(count));
      kept.resize(size_t(count * vocab));
      one.extend(batch, Decoder::Rows::all, [&](int64_t first, const Tensor& logits) {
        std::copy_n(logits.ptr<float>(), logits.numel(), kept.data() + (first - at) * vocab);
      });
      two.extend(batch, Decoder::Rows::all, [&](int64_t first, const Tensor& logits) {
        for (int64_t i = 0; i < logits.size(0) && first + i + 1 < n; ++i)
          meter.add(kept.data() + (first + i - at) * vocab, logits.ptr<float>() + i * vocab, vocab,
                    ids[size_t(first + i + 1)]);
      });
      at += count;
    }
  }
  return meter.result();
}

}  // namespace ingot
