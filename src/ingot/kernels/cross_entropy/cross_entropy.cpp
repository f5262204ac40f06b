#include "ingot/kernels/cross_entropy/cross_entropy.h"

#include <algorithm>
#include <cmath>

#include "ingot/core/cpu/cpu.h"
#include "ingot/core/cpu/thread_pool.h"
#include "ingot/core/dispatch.h"

INGOT_SIMD_DECLARE(float row_max(const float* logits, int64_t n);
                   double row_exp(const float* logits, float* out, int64_t n, float high, float softcap);
                   void row_scale(float* x, int64_t n, float factor);
                   double row_sum(const float* logits, int64_t n, float softcap);
                   void row_smoothed(const float* logits, float* out, int64_t n, float high, float softcap, float scale,
                                     float share);)

namespace ingot {
namespace {

// A chunk of logits should stay in the outer cache between its three products. Large vocabularies exceed this limit up
// to kMostChunkBytes: a chunk needs enough rows to pay for reading the weights and adding to their gradient once per
// chunk.
constexpr int64_t kChunkBytes = 4 << 20, kMostChunkBytes = 16 << 20, kPayingRows = 512;

void check_rows(const Tensor& t, const Tensor& like, Shape shape, const char* what) {
  INGOT_CHECK(t.shape == shape, what, ": found shape ", t.shape, ", expected ", shape);
  INGOT_CHECK_EQ(t.dtype, like.dtype, what, " dtype");
  INGOT_CHECK_EQ(t.device, like.device, what, " device");
  INGOT_CHECK(t.rows_uniform() || t.numel() == 0, what, ": found strides that one row stride cannot express, shape ",
              t.shape);
}
// Losses and statistics of rows are f32 (f64 of f64), whatever the logits' or operands' type.
Tensor sums_like(const Tensor& t) {
  Tensor like = t;
  like.dtype = t.dtype == DType::f64 ? DType::f64 : DType::f32;
  return like;
}
void check_rows_or_none(const Tensor& t, const Tensor& like, Shape shape, const char* what) {
  if (t) check_rows(t, like, shape, what);
}

// The matrix of a second pair: a single matrix, or one for each segment.
void check_pair(const Tensor& t, const Tensor& like, Shape shape, const char* what) {
  if (!t || shape.rank == 2) return check_rows_or_none(t, like, shape, what);
  INGOT_CHECK(t.shape == shape && t.step(-1) == 1, what, ": found shape ", t.shape, ", expected ", shape,
              " of contiguous rows");
  check_rows_or_none(t.size(0) > 0 ? t.row(0) : Tensor(), like, {shape[1], shape[2]}, what);
}
void check_segments(std::span<const int32_t> cu, int64_t rows, bool second) {
  if (cu.empty()) return;
  INGOT_CHECK(second, "linear_cross_entropy: found cu2 without x2, expected both");
  INGOT_CHECK(cu.front() == 0 && int64_t(cu.back()) == rows, "linear_cross_entropy: found cu2 from ", cu.front(),
              " to ", cu.back(), ", expected 0 to ", rows);
  for (size_t s = 0; s + 1 < cu.size(); ++s) INGOT_CHECK_LE(cu[s], cu[s + 1], "linear_cross_entropy: cu2[", s, "]");
}

void check_targets(const Tensor& targets, int64_t rows, const Tensor& like, const char* op) {
  INGOT_CHECK(targets.shape == Shape{rows} && targets.contiguous(), op, ": found targets of shape ", targets.shape,
              ", expected contiguous ", Shape{rows});
  INGOT_CHECK_EQ(targets.dtype, DType::i32, op, ": targets dtype");
  INGOT_CHECK_EQ(targets.device, like.device, op, ": targets device");
}
// Reads the targets, so this check is only for targets in host memory.
void check_target_values(const Tensor& targets, int64_t vocab, int32_t ignore_index, const char* op) {
  const int32_t* target = targets.ptr<int32_t>();
  for (int64_t t = 0; t < targets.size(0); ++t)
    INGOT_CHECK((target[t] >= 0 && target[t] < vocab) || target[t] == ignore_index, op, ": found target ", target[t],
                " at position ", t, ", expected 0 to ", vocab - 1, " (a vocabulary of ", vocab, ") or ", ignore_index);
}
void check_options(double softcap, double z_loss, double label_smoothing, const char* op) {
  // Kernels store the cap in fp32 and divide by it in fp32.
  INGOT_CHECK(softcap == 0 || (softcap >= 1e-30 && softcap <= 1e30), op, ": found softcap ", softcap,
              ", expected 0 (none) or 1e-30 to 1e30");
  INGOT_CHECK(z_loss >= 0 && std::isfinite(z_loss), op, ": found z_loss ", z_loss, ", expected 0 or more");
  INGOT_CHECK(label_smoothing >= 0 && label_smoothing <= 1, op, ": found label_smoothing ", label_smoothing,
              ", expected 0 to 1");
}

}  // namespace

namespace cpu {
namespace {

// The mean of capped logits under the smoothed target; `total` is their sum. Without smoothing only the target counts,
// even if other logits are not finite.
template <class T> T expected_logit(T at_target, T total, int64_t V, T smoothing) {
  return smoothing > 0 ? (1 - smoothing) * at_target + smoothing * total / T(V) : at_target;
}

// One row; `out` is null where no gradient is wanted, and may be `logits`.
template <class T> struct RowLoss { T loss = 0, lse = 0; };
template <class T>
RowLoss<T> row_loss(const T* logits, T* out, int64_t V, int64_t target, bool ignored, T dloss, T softcap, T z_loss,
                    T smoothing) {
  const auto capped = [&](T l) { return softcap > 0 ? softcap * std::tanh(l / softcap) : l; };
  T high = capped(logits[0]);
  for (int64_t v = 1; v < V; ++v) high = std::max(high, capped(logits[v]));
  T sum = 0, total = 0;
  for (int64_t v = 0; v < V; ++v) sum += std::exp(capped(logits[v]) - high);
  for (int64_t v = 0; smoothing > 0 && v < V; ++v) total += capped(logits[v]);
  RowLoss<T> row;
  row.lse = high + std::log(sum);
  if (!ignored)
    row.loss = row.lse - expected_logit<T>(capped(logits[target]), total, V, smoothing) + z_loss * row.lse * row.lse;
  if (out == nullptr) return row;
  if (ignored) {
    std::fill(out, out + V, T(0));  // even where the logits are not finite
    return row;
  }
  const T growth = 1 + 2 * z_loss * row.lse;
  for (int64_t v = 0; v < V; ++v) {
    const T c = capped(logits[v]), p = std::exp(c - row.lse), u = softcap > 0 ? c / softcap : T(0);
    out[v] = dloss * (p * growth - (1 - smoothing) * T(v == target) - smoothing / T(V)) * (1 - u * u);
  }
  return row;
}

// The same for fp32 in three passes over a row that stays in the inner caches: the maximum, the exponentials, and a
// scale. Smoothing needs a sum too, and computes the exponentials again, because the smoothing term is subtracted
// before the factor of the softcap's slope.
RowLoss<float> row_loss_fast(const float* logits, float* out, int64_t V, int64_t target, bool ignored, float dloss,
                             double softcap, double z_loss, double smoothing) {
  const auto capped = [&](double l) { return softcap > 0 ? softcap * std::tanh(l / softcap) : l; };
  const float high = float(capped(INGOT_SIMD_CALL(row_max, logits, V)));
  const double at_target = ignored ? 0 : capped(logits[target]);  // read before `out` may overwrite it
  const bool smooth = smoothing > 0 && !ignored;
  const double total = smooth ? INGOT_SIMD_CALL(row_sum, logits, V, float(softcap)) : 0;
  const double sum = INGOT_SIMD_CALL(row_exp, logits, ignored || smooth ? nullptr : out, V, high, float(softcap));
  const double lse = double(high) + std::log(sum), expected = expected_logit(at_target, total, V, smoothing);
  const RowLoss<float> row{ignored ? 0.f : float(lse - expected + z_loss * lse * lse), float(lse)};
  if (out == nullptr) return row;
  if (ignored) {
    std::fill(out, out + V, 0.f);
    return row;
  }
  const float scale = float(dloss * (1 + 2 * z_loss * lse) / sum);
  if (smooth)
    INGOT_SIMD_CALL(row_smoothed, logits, out, V, high, float(softcap), scale, float(dloss * smoothing / double(V)));
  else
    INGOT_SIMD_CALL(row_scale, out, V, scale);
  const double u = softcap > 0 ? at_target / softcap : 0;
  out[target] = float(double(out[target]) - dloss * (1 - smoothing) * (1 - u * u));
  return row;
}

template <class T> void cross_entropy_typed(const CrossEntropy& a) {
  const int64_t V = a.logits.cols();
  const T* logits = a.logits.ptr<T>();
  const int32_t* targets = a.targets.ptr<int32_t>();
  const T* dloss = a.dloss ? a.dloss.ptr<T>() : nullptr;
  T *loss = a.loss.ptr<T>(), *lse = a.lse ? a.lse.ptr<T>() : nullptr, *dlogits = dloss ? a.dlogits.ptr<T>() : nullptr;
  parallel_for(a.logits.rows(), std::max<int64_t>(1, 16384 / V), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* l = logits + t * a.logits.row_stride();
      const T d = dloss ? dloss[t] : T(0);
      T* out = dlogits ? dlogits + t * a.dlogits.row_stride() : nullptr;
      const bool ignored = targets[t] == a.ignore_index;
      RowLoss<T> row;
      if constexpr (std::is_same_v<T, float>)
        row = row_loss_fast(l, out, V, targets[t], ignored, d, a.softcap, a.z_loss, a.label_smoothing);
      else
        row = row_loss<T>(l, out, V, targets[t], ignored, d, T(a.softcap), T(a.z_loss), T(a.label_smoothing));
      loss[t] = row.loss;
      if (lse) lse[t] = row.lse;
    }
  });
}

}  // namespace

void cross_entropy(const CrossEntropy& a, Stream) {
  check_target_values(a.targets, a.logits.cols(), a.ignore_index, "cross_entropy");
  if (a.logits.rows() == 0) return;
  with_wide_float_type(a.logits.dtype, "cross_entropy", [&](auto scalar) { cross_entropy_typed<decltype(scalar)>(a); });
}

}  // namespace cpu

namespace cuda {
void cross_entropy(const CrossEntropy& a, Stream stream);
void linear_cross_entropy(const LinearCrossEntropy& a, Stream stream);
int64_t linear_cross_entropy_workspace_bytes(int64_t rows, int64_t features, int64_t vocab, DType dtype,
                                             Products products, Device device);
}  // namespace cuda

void cross_entropy(const CrossEntropy& a, Stream stream) {
  const int64_t T = a.logits.rows();
  INGOT_CHECK(a.logits.rank() == 2 && a.logits.cols() > 0, "cross_entropy: found logits of shape ", a.logits.shape,
              ", expected (T, V) with V > 0");
  check_rows(a.logits, a.logits, a.logits.shape, "cross_entropy: logits");
  check_targets(a.targets, T, a.logits, "cross_entropy");
  const Tensor sums = sums_like(a.logits);
  check_rows(a.loss, sums, {T}, "cross_entropy: loss");
  check_rows_or_none(a.lse, sums, {T}, "cross_entropy: lse");
  check_rows_or_none(a.dloss, sums, {T}, "cross_entropy: dloss");
  const bool narrow = a.logits.device.kind != Device::cpu && a.logits.dtype == DType::f32 &&
                      (a.dlogits.dtype == DType::bf16 || a.dlogits.dtype == DType::f16);
  if (a.dloss) check_rows(a.dlogits, narrow ? a.dlogits : a.logits, a.logits.shape, "cross_entropy: dlogits");
  if (a.dloss) INGOT_CHECK_EQ(a.dlogits.device, a.logits.device, "cross_entropy: dlogits device");
  check_options(a.softcap, a.z_loss, a.label_smoothing, "cross_entropy");
  INGOT_DISPATCH(CROSS_ENTROPY, a.logits.device, cross_entropy, a, stream);
}

namespace cpu {
void linear_cross_entropy(const LinearCrossEntropy& a, Stream stream);
namespace {

// The largest number of rows of a chunk: a multiple of 16 for the products.
int64_t most_chunk_rows(int64_t vocab, DType dtype) {
  const int64_t row = std::max<int64_t>(1, vocab * size_of(dtype));
  return std::max<int64_t>(16, std::clamp(kPayingRows * row, kChunkBytes, kMostChunkBytes) / row / 16 * 16);
}
// Equal chunks except for the last one.
int64_t chunk_rows(int64_t rows, int64_t vocab, DType dtype) {
  const int64_t fit = most_chunk_rows(vocab, dtype), chunks = std::max<int64_t>(1, (rows + fit - 1) / fit);
  return ((rows + chunks - 1) / chunks + 15) / 16 * 16;
}
// Elements between the logits' rows. Rows whole pages apart would share a set of the first-level cache.
int64_t logits_stride(int64_t vocab, DType dtype) {
  const int64_t size = size_of(dtype);
  return vocab * size % 4096 == 0 ? vocab + 64 / size : vocab;
}
// A workspace also serves calls with fewer rows, because its part for logits has the size of the largest chunk.
int64_t logits_bytes(int64_t rows, int64_t vocab, DType dtype) {
  const int64_t most = std::min((rows + 15) / 16 * 16, most_chunk_rows(vocab, dtype));
  return most * logits_stride(vocab, dtype) * size_of(dtype);
}
int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

Tensor rows_of(const Tensor& t, int64_t begin, int64_t end) { return t ? t.slice(0, begin, end) : Tensor(); }

void backward(const LinearCrossEntropy& a, const Tensor& dlogits, const Tensor& x, const Tensor& w, const Tensor& dx,
              const Tensor& dw, Stream stream) {
  if (dx || dw) linear_backward({.dy = dlogits, .x = x, .w = w, .dx = dx, .dw = dw, .products = a.products}, stream);
}

// Segments are computed one after another, so that the bits of a segment do not depend on other segments.
void of_each_segment(const LinearCrossEntropy& a, Stream stream) {
  for (size_t s = 0; s + 1 < a.cu2.size(); ++s) {
    LinearCrossEntropy one = a;
    one.cu2 = {};
    for (Tensor* t : {&one.x, &one.x2, &one.targets, &one.loss, &one.lse, &one.dloss, &one.dx, &one.dx2})
      *t = rows_of(*t, a.cu2[s], a.cu2[s + 1]);
    one.w2 = a.w2.row(int64_t(s));
    if (a.dw2) one.dw2 = a.dw2.row(int64_t(s));
    cpu::linear_cross_entropy(one, stream);
  }
}

}  // namespace

int64_t linear_cross_entropy_workspace_bytes(int64_t rows, int64_t features, int64_t vocab, DType dtype,
                                             Products products) {
  const int64_t logits = logits_bytes(rows, vocab, dtype);
  if (rows <= most_chunk_rows(vocab, dtype)) return logits;
  return aligned(logits) + linear_packed_bytes(Tensor(nullptr, dtype, {vocab, features}), products);
}

void linear_cross_entropy(const LinearCrossEntropy& a, Stream stream) {
  if (!a.cu2.empty()) return of_each_segment(a, stream);
  const int64_t T = a.x.size(0), V = a.w.size(0), step = chunk_rows(T, V, a.x.dtype);
  check_target_values(a.targets, V, a.ignore_index, "linear_cross_entropy");
  Tensor packed;
  if (T > step) {  // each chunk multiplies the same weights
    const int64_t begin = aligned(logits_bytes(T, V, a.x.dtype));
    packed = a.workspace.slice(0, begin, begin + linear_packed_bytes(a.w, a.products));
    linear_pack({.w = a.w, .packed = packed, .products = a.products});
  }
  for (int64_t begin = 0; begin < T; begin += step) {
    const int64_t end = std::min(T, begin + step);
    Tensor logits(a.workspace.data, a.x.dtype, {end - begin, V});
    logits.stride[0] = logits_stride(V, a.x.dtype);
    const Tensor x = rows_of(a.x, begin, end), x2 = rows_of(a.x2, begin, end);
    linear({.x = x, .w = a.w, .y = logits, .products = a.products, .w_packed = packed}, stream);
    if (x2) linear({.x = x2, .w = a.w2, .y = logits, .accumulate = true, .products = a.products}, stream);
    const Tensor dloss = rows_of(a.dloss, begin, end);
    ingot::cross_entropy({.logits = logits,
                          .targets = rows_of(a.targets, begin, end),
                          .loss = rows_of(a.loss, begin, end),
                          .lse = rows_of(a.lse, begin, end),
                          .dloss = dloss,
                          .dlogits = dloss ? logits : Tensor(),
                          .softcap = a.softcap,
                          .z_loss = a.z_loss,
                          .ignore_index = a.ignore_index,
                          .label_smoothing = a.label_smoothing},
                         stream);
    if (!dloss) continue;
    backward(a, logits, x, a.w, rows_of(a.dx, begin, end), a.dw, stream);
    if (x2) backward(a, logits, x2, a.w2, rows_of(a.dx2, begin, end), a.dw2, stream);
  }
}

}  // namespace cpu

int64_t linear_cross_entropy_workspace_bytes(int64_t rows, int64_t features, int64_t vocab, DType dtype,
                                             Products products, Device device) {
  if constexpr (INGOT_HAS_CUDA(CROSS_ENTROPY))
    if (device.kind == Device::cuda)
      return cuda::linear_cross_entropy_workspace_bytes(rows, features, vocab, dtype, products, device);
  if (device.kind != Device::cpu) detail::no_cuda("linear_cross_entropy", device);
  return cpu::linear_cross_entropy_workspace_bytes(rows, features, vocab, dtype, products);
}

void linear_cross_entropy(const LinearCrossEntropy& a, Stream stream) {
  INGOT_CHECK(a.x.rank() == 2 && a.w.rank() == 2 && a.w.size(0) > 0, "linear_cross_entropy: found x ", a.x.shape,
              " and w ", a.w.shape, ", expected (T, C) and (V, C) with V > 0");
  const int64_t T = a.x.size(0), C = a.x.size(1), V = a.w.size(0);
  check_rows(a.x, a.x, {T, C}, "linear_cross_entropy: x");
  check_rows(a.w, a.x, {V, C}, "linear_cross_entropy: w");
  INGOT_CHECK(bool(a.x2) == bool(a.w2), "linear_cross_entropy: found x2 ", a.x2.shape, " and w2 ", a.w2.shape,
              ", expected both or neither");
  const int64_t R = a.x2 ? a.x2.cols() : 0;
  check_rows_or_none(a.x2, a.x, {T, R}, "linear_cross_entropy: x2");
  check_segments(a.cu2, T, bool(a.x2));
  const int64_t S = int64_t(a.cu2.size()) - 1;
  const Shape second = a.cu2.empty() ? Shape{V, R} : Shape{S, V, R};
  check_pair(a.w2, a.x, second, "linear_cross_entropy: w2");
  check_targets(a.targets, T, a.x, "linear_cross_entropy");
  const Tensor sums = sums_like(a.x);
  check_rows(a.loss, sums, {T}, "linear_cross_entropy: loss");
  check_rows_or_none(a.lse, sums, {T}, "linear_cross_entropy: lse");
  check_rows_or_none(a.dloss, sums, {T}, "linear_cross_entropy: dloss");
  check_rows_or_none(a.dx, a.x, {T, C}, "linear_cross_entropy: dx");
  const auto weight_gradient_like = [&](const Tensor& dw) { return dw && dw.dtype == sums.dtype ? sums : a.x; };
  check_rows_or_none(a.dw, weight_gradient_like(a.dw), {V, C}, "linear_cross_entropy: dw");
  check_rows_or_none(a.dx2, a.x, {T, R}, "linear_cross_entropy: dx2");
  check_pair(a.dw2, weight_gradient_like(a.dw2), second, "linear_cross_entropy: dw2");
  INGOT_CHECK(a.dloss || !(a.dx || a.dw || a.dx2 || a.dw2),
              "linear_cross_entropy: found outputs for gradients without dloss, expected dloss or no gradients");
  check_options(a.softcap, a.z_loss, a.label_smoothing, "linear_cross_entropy");
  const int64_t needed = linear_cross_entropy_workspace_bytes(T, C, V, a.x.dtype, a.products, a.x.device);
  INGOT_CHECK_GE(a.workspace ? a.workspace.bytes() : 0, needed, "linear_cross_entropy: workspace bytes");
  INGOT_CHECK(needed == 0 || a.workspace.device == a.x.device, "linear_cross_entropy: found workspace on ",
              a.workspace.device, ", expected ", a.x.device);
  INGOT_DISPATCH(CROSS_ENTROPY, a.x.device, linear_cross_entropy, a, stream);
}

}  // namespace ingot
