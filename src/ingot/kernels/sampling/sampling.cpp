#include "ingot/kernels/sampling/sampling.h"

#include <algorithm>
#include <cmath>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/dispatch.h"

namespace ingot {

void check(const SamplingOptions& o) {
  INGOT_CHECK(o.temperature >= 0 && std::isfinite(o.temperature), "sampling: found temperature ", o.temperature,
              ", expected a finite number of at least 0");
  INGOT_CHECK(o.top_k >= 0, "sampling: found top_k ", o.top_k, ", expected 0 (all) or more");
  INGOT_CHECK(o.top_p > 0 && o.top_p <= 1, "sampling: found top_p ", o.top_p, ", expected it in (0, 1]");
  INGOT_CHECK(o.min_p >= 0 && o.min_p < 1, "sampling: found min_p ", o.min_p, ", expected it in [0, 1)");
}

namespace cpu {
namespace {

// Tokens are ordered by logit, the largest first, equal logits by id. Every filter keeps a prefix of that order, so
// what is kept is described by its last token, and the draw walks the vocabulary by id without sorting it.
template <class T> struct Row {
  const T* logits;
  int64_t V;
  int32_t* order;  // V ids; the first `sorted` are in order, and none of the rest comes before them
  double* weight;  // V: exp((logit - max) / temperature), 1 for the most likely
  int64_t kept;    // tokens kept so far
  int64_t sorted = 0;

  accum_t<T> logit(int32_t v) const { return accum_t<T>(logits[v]); }
  bool before(int32_t a, int32_t b) const { return logit(a) != logit(b) ? logit(a) > logit(b) : a < b; }

  // Makes the first n ids of `order` the first n tokens, in order.
  void sort_first(int64_t n) {
    const auto less = [this](int32_t a, int32_t b) { return before(a, b); };
    if (n <= sorted) return;
    if (n < V) std::nth_element(order + sorted, order + n - 1, order + V, less);
    std::sort(order + sorted, order + n, less);
    sorted = n;
  }
  void keep_top_k(int64_t k) { kept = k > 0 ? std::min(kept, k) : kept; }
  // The shortest prefix with at least p of the probability kept so far.
  void keep_top_p(double p) {
    if (p >= 1) return;
    double total = 0, sum = 0;
    if (kept < V) {
      sort_first(kept);
      for (int64_t i = 0; i < kept; ++i) total += weight[order[i]];
    } else {
      for (int64_t v = 0; v < V; ++v) total += weight[v];
    }
    for (int64_t i = 0; i < kept; ++i) {
      if (i == sorted) sort_first(std::min(kept, std::max<int64_t>(64, 4 * sorted)));
      sum += weight[order[i]];
      if (sum >= p * total) {
        kept = i + 1;
        return;
      }
    }
  }
  int32_t draw(double uniform, double min_p) {
    int32_t last = -1;
    if (kept < V) {
      sort_first(kept);
      last = order[kept - 1];
    }
    const auto allowed = [&](int32_t v) { return weight[v] >= min_p && (last < 0 || v == last || before(v, last)); };
    double total = 0, sum = 0;
    for (int32_t v = 0; v < V; ++v) total += allowed(v) ? weight[v] : 0;
    int32_t chosen = -1;
    for (int32_t v = 0; v < V; ++v) {
      if (!allowed(v) || weight[v] == 0) continue;
      chosen = v;
      if ((sum += weight[v]) >= uniform * total) break;
    }
    return chosen;
  }
};

template <class T> int32_t most_likely(const T* logits, int64_t V, int64_t row) {
  using A = accum_t<T>;
  int32_t best = 0;
  for (int64_t v = 0; v < V; ++v) {
    if (std::isnan(A(logits[v])))
      fail(ErrorCode::numeric, "sample: found a NaN logit in row ", row, " at token ", v, ", expected numbers");
    if (A(logits[v]) > A(logits[best])) best = int32_t(v);
  }
  if (A(logits[best]) == -HUGE_VAL)
    fail(ErrorCode::numeric, "sample: found only -inf logits in row ", row, ", expected at least one finite logit");
  return best;
}

template <class T> int32_t sample_row(const T* logits, int64_t V, int64_t row, const Sample& s) {
  const int32_t best = most_likely(logits, V, row);
  if (s.options.temperature == 0) return best;
  double* weight = static_cast<double*>(thread_scratch(0, V * int64_t(sizeof(double) + sizeof(int32_t))));
  int32_t* order = reinterpret_cast<int32_t*>(weight + V);
  const double high = double(accum_t<T>(logits[best]));
  for (int64_t v = 0; v < V; ++v) {
    const double l = double(accum_t<T>(logits[v]));
    weight[v] = l == high ? 1 : std::exp((l - high) / s.options.temperature);  // so that two +inf logits share
    order[v] = int32_t(v);
  }
  Row<T> r{logits, V, order, weight, V};
  r.keep_top_k(s.options.top_k);
  r.keep_top_p(s.options.top_p);
  const uint32_t step = s.step + (s.step_there ? uint32_t(*s.step_there.ptr<int32_t>()) : 0);
  return r.draw(Rng(s.seed, Purpose::sampling, step).uniform(uint64_t(row)), s.options.min_p);
}

}  // namespace

void sample(const Sample& s, Stream) {
  with_float_type(s.logits.dtype, "sample", [&](auto scalar) {
    using T = decltype(scalar);
    const T* logits = s.logits.ptr<T>();
    int32_t* tokens = s.tokens.ptr<int32_t>();
    parallel_for(s.logits.size(0), 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b)
        tokens[b * s.tokens.step(0)] = sample_row(logits + b * s.logits.row_stride(), s.logits.cols(), b, s);
    });
  });
}

}  // namespace cpu

namespace cuda {
void sample(const Sample& s, Stream stream);
}  // namespace cuda

void sample(const Sample& s, Stream stream) {
  check(s.options);
  INGOT_CHECK(s.logits.rank() == 2 && s.logits.cols() > 0 && s.logits.cols() <= INT32_MAX,
              "sample: found logits of shape ", s.logits.shape, ", expected (B, V) with 0 < V < 2^31");
  INGOT_CHECK(s.logits.rows_uniform() || s.logits.numel() == 0,
              "sample: found logits with strided rows, expected contiguous ones");
  const Shape expected{s.logits.size(0)};
  INGOT_CHECK(s.tokens.shape == expected, "sample: found tokens of shape ", s.tokens.shape, ", expected ", expected);
  INGOT_CHECK_EQ(s.tokens.dtype, DType::i32, "sample: tokens dtype");
  INGOT_CHECK_EQ(s.tokens.device, s.logits.device, "sample: tokens device");
  INGOT_CHECK(!s.step_there || (s.step_there.numel() == 1 && s.step_there.device == s.logits.device),
              "sample: found step_there of shape ", s.step_there.shape, " on ", s.step_there.device,
              ", expected (1) on ", s.logits.device);
  INGOT_DISPATCH(SAMPLING, s.logits.device, sample, s, stream);
}

}  // namespace ingot
