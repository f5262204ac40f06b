#include "ingot/kernels/sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/dispatch.h"
#include "ingot/kernels/sampling/filters.h"

namespace ingot {

void check(const SamplingOptions& o) {
  INGOT_CHECK(o.temperature >= 0 && std::isfinite(o.temperature), "sampling: found temperature ", o.temperature,
              ", expected a finite number of at least 0");
  INGOT_CHECK(o.top_k >= 0, "sampling: found top_k ", o.top_k, ", expected 0 (all) or more");
  INGOT_CHECK(o.top_p > 0 && o.top_p <= 1, "sampling: found top_p ", o.top_p, ", expected it in (0, 1]");
  INGOT_CHECK(o.min_p >= 0 && o.min_p <= 1, "sampling: found min_p ", o.min_p, ", expected it in [0, 1]");
}

SampleRow row_of(const SamplingOptions& o, int64_t ids) {
  check(o);
  SampleRow row;
  row.ids = int32_t(ids);
  row.temperature = o.temperature < 1e-30 ? 0.f : float(std::min(o.temperature, 1e30));
  row.most_octaves = HUGE_VALF;
  if (row.temperature == 0) return row;  // without temperature every filter keeps the likeliest id
  row.octaves_per_logit = float(1.4426950408889634 / double(row.temperature));
  row.top_k = o.top_k < ids ? int32_t(o.top_k) : 0;
  row.top_p = o.top_p < 1 ? uint32_t(std::clamp(std::nearbyint(o.top_p * 0x1p32), 1., 0x1p32 - 1)) : 0;
  if (o.min_p > 0) row.most_octaves = float(-std::log2(o.min_p));
  return row;
}
bool filters(const SampleRow& r) { return r.top_k > 0 || r.top_p > 0 || r.most_octaves < HUGE_VALF; }

namespace cpu {
namespace {

using namespace sampling;

// A is float, or double for f64 logits.
template <class A> struct Row {
  const A* logits;  // the adjusted logits
  int32_t ids;
  const SampleRow& row;
  int32_t best;      // the lowest id among those with the largest logit
  int32_t last = 0;  // the last id that is kept, in the order of falling logits; -1: all ids are kept

  bool before(int32_t a, int32_t b) const { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; }
  bool kept(int32_t v) const { return last < 0 || v == last || before(v, last); }
  float octaves(int32_t v) const { return octaves_below(logits[best], logits[v], row.octaves_per_logit); }

  // Keeps the ids, in the order of falling logits, up to the first at which the sum of weights reaches target(total of
  // all kept ids).
  template <class Weight, class Target> void cut(Weight&& weight, Target&& target) {
    std::vector<Wide> sums(kBins, 0);
    Wide total = 0;
    for (int32_t v = 0; v < ids; ++v) {
      if (!kept(v)) continue;
      const float o = octaves(v);
      const Wide w = weight(o);
      sums[size_t(bin_of(o))] += w, total += w;
    }
    const Wide wanted = target(total);
    Wide sum = 0;
    int bin = 0;
    while (bin < kBins - 1 && sum + sums[size_t(bin)] < wanted) sum += sums[size_t(bin++)];
    std::vector<int32_t> inside;
    for (int32_t v = 0; v < ids; ++v)
      if (kept(v) && bin_of(octaves(v)) == bin) inside.push_back(v);
    std::sort(inside.begin(), inside.end(), [this](int32_t a, int32_t b) { return before(a, b); });
    for (const int32_t v : inside)
      if ((sum += weight(octaves(v))) >= wanted) {
        last = v;
        return;
      }
  }
  void filter() {
    last = -1;
    if (row.top_k > 0) cut([](float) { return Wide(1); }, [&](Wide) { return Wide(uint32_t(row.top_k)); });
    if (row.top_p > 0)
      cut([](float o) { return weight_of(mantissa_of(o), bin_of(o)); },
          [&](Wide total) { return target_of(total, row.top_p); });
  }
  // The sum of an id is computed only where a bound on the noise shows that the id can win.
  template <class Allowed> int32_t likeliest_with_noise(uint32_t step, Allowed&& allowed) const {
    const Noise noise(row.seed, step, row.lane);
    const A T = A(row.temperature);
    int32_t chosen = best;
    A largest = -std::numeric_limits<A>::infinity();
    for (int32_t base = 0; base < ids; base += 4) {
      const auto words = noise.words(uint32_t(base) / 4);
      for (int32_t v = base; v < std::min(base + 4, ids); ++v) {
        const uint32_t word = words[size_t(v - base)];
        if (complement(word) >= kTail && !(std::fma(T, A(noise_bound(word)), logits[v]) > largest)) continue;
        if (!allowed(v)) continue;
        const A sum = noisy(T, A(noise.of(uint32_t(v), word)), logits[v]);
        if (sum > largest) largest = sum, chosen = v;
      }
    }
    return chosen;
  }
};

template <class A> int32_t most_likely(const A* logits, int32_t ids, int64_t row) {
  int32_t best = 0;
  for (int32_t v = 0; v < ids; ++v) {
    if (std::isnan(logits[v]))
      fail(ErrorCode::numeric, "sample: found a NaN logit in row ", row, " at token ", v, ", expected numbers");
    if (logits[v] > logits[best]) best = v;
  }
  if (logits[best] == -HUGE_VAL)
    fail(ErrorCode::numeric, "sample: found only -inf logits in row ", row, ", expected at least one finite logit");
  return best;
}

// The logits of a row with its biases and its mask: the given logits where there is nothing to adjust, else a copy in
// this thread's scratch memory.
template <class T> const accum_t<T>* adjusted(const Sample& s, const SampleRow& r) {
  using A = accum_t<T>;
  const T* const logits = s.logits.ptr<T>() + r.row * s.logits.row_stride();
  if constexpr (std::is_same_v<T, A>)
    if (r.biases == 0 && r.masked == 0) return logits;
  A* const x = static_cast<A*>(thread_scratch(0, r.ids * int64_t(sizeof(A))));
  for (int32_t v = 0; v < r.ids; ++v) x[v] = A(logits[v]);
  for (int32_t i = 0; i < r.biases; ++i)
    if (const int32_t id = s.bias_ids.ptr<int32_t>()[r.row * s.bias_ids.row_stride() + i]; id < r.ids)
      x[id] += A(s.biases.ptr<float>()[r.row * s.biases.row_stride() + i]);
  if (r.masked == 0) return x;
  const uint32_t* const words = s.allowed.ptr<uint32_t>() + r.row * s.allowed.row_stride();
  for (int32_t v = 0; v < r.ids; ++v)
    if ((words[v / 32] >> (v % 32) & 1) == 0) x[v] = -std::numeric_limits<A>::infinity();
  return x;
}

template <class T> int32_t sample_row(const Sample& s, const SampleRow& r) {
  using A = accum_t<T>;
  const A* const logits = adjusted<T>(s, r);
  Row<A> row{logits, r.ids, r, most_likely(logits, r.ids, r.row)};
  if (r.temperature == 0) return row.best;
  const uint32_t step = r.step + (s.device_step ? uint32_t(*s.device_step.ptr<int32_t>()) : 0);
  if (!filters(r)) return row.likeliest_with_noise(step, [](int32_t) { return true; });
  row.filter();
  return row.likeliest_with_noise(step, [&](int32_t v) { return row.octaves(v) <= r.most_octaves && row.kept(v); });
}

SampleRow own_row(const Sample& s, int64_t b) {
  if (s.rows) return static_cast<const SampleRow*>(s.rows.data)[b];
  SampleRow r = row_of(s.options, s.logits.cols());
  r.seed = s.seed, r.step = s.step, r.lane = uint32_t(b), r.row = int32_t(b);
  r.biases = s.bias_ids ? int32_t(s.bias_ids.cols()) : 0, r.masked = s.allowed ? 1 : 0;
  return r;
}

}  // namespace

void sample(const Sample& s, Stream) {
  with_float_type(s.logits.dtype, "sample", [&](auto scalar) {
    int32_t* const tokens = s.tokens.ptr<int32_t>();
    parallel_for(s.rows ? s.rows.size(0) : s.logits.size(0), 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b) {
        const SampleRow r = own_row(s, b);
        tokens[r.row * s.tokens.step(0)] = sample_row<decltype(scalar)>(s, r);
      }
    });
  });
}

}  // namespace cpu

namespace cuda {
int64_t sample_workspace_bytes(int64_t rows);
void sample(const Sample& s, Stream stream);
}  // namespace cuda

int64_t sample_workspace_bytes(int64_t rows, Device device) {
  if constexpr (INGOT_HAS_CUDA(SAMPLING))
    if (device.kind == Device::cuda) return cuda::sample_workspace_bytes(rows);
  return 0;
}

void sample(const Sample& s, Stream stream) {
  check(s.options);
  INGOT_CHECK(s.logits.rank() == 2 && s.logits.cols() > 0 && s.logits.cols() < int64_t(1) << 30,
              "sample: found logits of shape ", s.logits.shape, ", expected (R, V) with 0 < V < 2^30");
  INGOT_CHECK(s.logits.rows_uniform() || s.logits.numel() == 0,
              "sample: found logits with strided rows, expected contiguous ones");
  const int64_t R = s.logits.size(0), V = s.logits.cols();
  const Shape expected{R}, words{R, (V + 31) / 32};
  INGOT_CHECK(s.tokens.shape == expected, "sample: found tokens of shape ", s.tokens.shape, ", expected ", expected);
  INGOT_CHECK_EQ(s.tokens.dtype, DType::i32, "sample: tokens dtype");
  INGOT_CHECK(!s.device_step || s.device_step.numel() == 1, "sample: found device_step of shape ", s.device_step.shape,
              ", expected (1)");
  INGOT_CHECK(bool(s.bias_ids) == bool(s.biases) &&
                  (!s.biases || (s.bias_ids.rank() == 2 && s.bias_ids.size(0) == R && s.bias_ids.dtype == DType::i32 &&
                                 s.biases.shape == s.bias_ids.shape && s.biases.dtype == DType::f32)),
              "sample: found ids and biases of shapes ", s.bias_ids.shape, " and ", s.biases.shape,
              ", expected as many i32 as f32 for each of ", R, " rows, or neither");
  INGOT_CHECK(!s.allowed || (s.allowed.shape == words && s.allowed.dtype == DType::u32),
              "sample: found allowed of shape ", s.allowed.shape, " in ", s.allowed.dtype, ", expected ", words,
              " in u32");
  INGOT_CHECK(!s.rows || (s.rows.rank() == 2 && s.rows.dtype == DType::u8 &&
                          s.rows.cols() == int64_t(sizeof(SampleRow)) && s.rows.size(0) <= R),
              "sample: found rows of shape ", s.rows.shape, " in ", s.rows.dtype, ", expected at most ", R, " of ",
              sizeof(SampleRow), " in u8");
  for (const Tensor* t : {&s.tokens, &s.device_step, &s.bias_ids, &s.biases, &s.allowed, &s.rows, &s.workspace})
    INGOT_CHECK(!*t || t->device == s.logits.device, "sample: found operands on ", t->device, " and ", s.logits.device,
                ", expected one device");
  const int64_t needed = sample_workspace_bytes(s.rows ? s.rows.size(0) : R, s.logits.device);
  INGOT_CHECK(needed == 0 || s.workspace.bytes() >= needed, "sample: found a workspace of ",
              s.workspace ? s.workspace.bytes() : 0, " bytes, expected ", needed);
  INGOT_DISPATCH(SAMPLING, s.logits.device, sample, s, stream);
}

}  // namespace ingot
