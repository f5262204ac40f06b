#include "ingot/kernels/sampling/logprobs.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ingot/core/dispatch.h"
#include "ingot/kernels/sampling/sampling.h"

namespace ingot {
namespace cpu {
namespace {

template <class T> void of_row(const Logprobs& l, int64_t r, int64_t V) {
  const int64_t k = l.top ? l.top.cols() : 0;
  const T* const row = l.logits.ptr<T>() + r * l.logits.row_stride();
  const double high = double(*std::max_element(row, row + V));
  double sum = 0;
  for (int64_t v = 0; v < V; ++v) sum += std::exp(double(row[v]) - high);
  const double log_sum = std::log(sum) + high;
  double* const values = l.values.ptr<double>() + r * l.values.row_stride();
  values[0] = double(row[l.token.ptr<int32_t>()[r * l.token.step(0)]]) - log_sum;
  std::vector<int32_t> order(static_cast<size_t>(V));
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + k, order.end(),
                    [&](int32_t a, int32_t b) { return row[a] != row[b] ? row[a] > row[b] : a < b; });
  for (int64_t i = 0; i < k; ++i) {
    l.top.ptr<int32_t>()[r * l.top.row_stride() + i] = order[size_t(i)];
    values[1 + i] = double(row[order[size_t(i)]]) - log_sum;
  }
}

}  // namespace

void logprobs(const Logprobs& l, Stream) {
  const auto use = [&](int64_t r, int64_t V) {
    if (l.logits.dtype == DType::f64) return of_row<double>(l, r, V);
    of_row<float>(l, r, V);
  };
  if (!l.rows) {
    for (int64_t r = 0; r < l.logits.size(0); ++r) use(r, l.logits.cols());
    return;
  }
  for (int64_t i = 0; i < l.rows.size(0); ++i) {
    const SampleRow& row = static_cast<const SampleRow*>(l.rows.data)[i];
    use(row.row, row.ids);
  }
}

}  // namespace cpu

namespace cuda {
int64_t logprobs_workspace_bytes(int64_t V, int64_t k, int64_t rows);
void logprobs(const Logprobs& l, Stream stream);
}  // namespace cuda

int64_t logprobs_workspace_bytes(int64_t V, int64_t k, Device device, int64_t rows) {
  if constexpr (INGOT_HAS_CUDA(SAMPLING))
    if (device.kind == Device::cuda) return cuda::logprobs_workspace_bytes(V, k, rows);
  return 0;
}

void logprobs(const Logprobs& given, Stream stream) {
  Logprobs l = given;
  if (l.logits.rank() == 1) {
    l.logits = l.logits.reshape({1, l.logits.numel()});
    if (l.top && l.top.rank() == 1) l.top = l.top.reshape({1, l.top.numel()});
    if (l.values.rank() == 1) l.values = l.values.reshape({1, l.values.numel()});
  }
  const bool on_cpu = l.logits.device.kind == Device::cpu;
  INGOT_CHECK(l.logits.rank() == 2 && l.logits.cols() > 0 && l.logits.cols() <= INT32_MAX && l.logits.rows_uniform(),
              "logprobs: found logits of shape ", l.logits.shape, ", expected (V) or (R, V) with 0 < V < 2^31");
  const int64_t R = l.logits.size(0), V = l.logits.cols(), k = l.top ? l.top.cols() : 0;
  INGOT_CHECK(l.logits.dtype == DType::f32 || (on_cpu && l.logits.dtype == DType::f64), "logprobs: found logits in ",
              l.logits.dtype, ", expected f32", on_cpu ? " or f64" : "");
  const Shape tokens{R}, values{R, 1 + k};
  INGOT_CHECK(l.token.shape == tokens && l.token.dtype == DType::i32, "logprobs: found tokens of shape ", l.token.shape,
              " in ", l.token.dtype, ", expected ", tokens, " in i32");
  INGOT_CHECK(k <= V && (!l.top || (l.top.rank() == 2 && l.top.size(0) == R && l.top.dtype == DType::i32)),
              "logprobs: found top of shape ", l.top.shape, " in ", l.top.dtype, ", expected ", R, " rows of at most ",
              V, " in i32");
  INGOT_CHECK(l.values.shape == values && l.values.dtype == DType::f64, "logprobs: found values of shape ",
              l.values.shape, " in ", l.values.dtype, ", expected ", values, " in f64");
  INGOT_CHECK(!l.rows || (l.rows.rank() == 2 && l.rows.dtype == DType::u8 &&
                          l.rows.cols() == int64_t(sizeof(SampleRow)) && l.rows.size(0) <= R),
              "logprobs: found rows of shape ", l.rows.shape, " in ", l.rows.dtype, ", expected at most ", R, " of ",
              sizeof(SampleRow), " in u8");
  const int64_t needed = logprobs_workspace_bytes(V, k, l.logits.device, l.rows ? l.rows.size(0) : R);
  INGOT_CHECK(needed == 0 || l.workspace.bytes() >= needed, "logprobs: found a workspace of ",
              l.workspace ? l.workspace.bytes() : 0, " bytes, expected ", needed);
  for (const Tensor* t : {&l.token, &l.top, &l.values, &l.rows, &l.workspace})
    INGOT_CHECK(!*t || t->device == l.logits.device, "logprobs: found operands on ", t->device, " and ",
                l.logits.device, ", expected one device");
  INGOT_DISPATCH(SAMPLING, l.logits.device, logprobs, l, stream);
}

}  // namespace ingot
