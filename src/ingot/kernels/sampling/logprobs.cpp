#include "ingot/kernels/sampling/logprobs.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "ingot/core/dispatch.h"

namespace ingot {
namespace cpu {
namespace {

template <class T> void of_row(const Logprobs& l) {
  const int64_t V = l.logits.numel(), k = l.top ? l.top.numel() : 0;
  const T* const row = l.logits.ptr<T>();
  const double high = double(*std::max_element(row, row + V));
  double sum = 0;
  for (int64_t v = 0; v < V; ++v) sum += std::exp(double(row[v]) - high);
  const double log_sum = std::log(sum) + high;
  double* const values = l.values.ptr<double>();
  values[0] = double(row[*l.token.ptr<int32_t>()]) - log_sum;
  std::vector<int32_t> order(static_cast<size_t>(V));
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + k, order.end(),
                    [&](int32_t a, int32_t b) { return row[a] != row[b] ? row[a] > row[b] : a < b; });
  for (int64_t i = 0; i < k; ++i)
    l.top.ptr<int32_t>()[i] = order[size_t(i)], values[1 + i] = double(row[order[size_t(i)]]) - log_sum;
}

}  // namespace

void logprobs(const Logprobs& l, Stream) {
  if (l.logits.dtype == DType::f64) return of_row<double>(l);
  of_row<float>(l);
}

}  // namespace cpu

namespace cuda {
int64_t logprobs_workspace_bytes(int64_t V, int64_t k);
void logprobs(const Logprobs& l, Stream stream);
}  // namespace cuda

int64_t logprobs_workspace_bytes(int64_t V, int64_t k, Device device) {
  if constexpr (INGOT_HAS_CUDA(SAMPLING))
    if (device.kind == Device::cuda) return cuda::logprobs_workspace_bytes(V, k);
  return 0;
}

void logprobs(const Logprobs& l, Stream stream) {
  const bool on_cpu = l.logits.device.kind == Device::cpu;
  const int64_t V = l.logits.numel(), k = l.top ? l.top.numel() : 0;
  INGOT_CHECK(l.logits.rank() == 1 && V > 0 && V <= INT32_MAX, "logprobs: found logits of shape ", l.logits.shape,
              ", expected (V) with 0 < V < 2^31");
  INGOT_CHECK(l.logits.dtype == DType::f32 || (on_cpu && l.logits.dtype == DType::f64), "logprobs: found logits in ",
              l.logits.dtype, ", expected f32", on_cpu ? " or f64" : "");
  INGOT_CHECK(l.token.numel() == 1 && l.token.dtype == DType::i32, "logprobs: found a token of shape ", l.token.shape,
              " in ", l.token.dtype, ", expected (1) in i32");
  INGOT_CHECK(k <= V && (!l.top || (l.top.rank() == 1 && l.top.dtype == DType::i32)), "logprobs: found top of shape ",
              l.top.shape, " in ", l.top.dtype, ", expected at most ", V, " in i32");
  const Shape values{1 + k};
  INGOT_CHECK(l.values.shape == values && l.values.dtype == DType::f64, "logprobs: found values of shape ",
              l.values.shape, " in ", l.values.dtype, ", expected ", values, " in f64");
  const int64_t needed = logprobs_workspace_bytes(V, k, l.logits.device);
  INGOT_CHECK(needed == 0 || l.workspace.bytes() >= needed, "logprobs: found a workspace of ",
              l.workspace ? l.workspace.bytes() : 0, " bytes, expected ", needed);
  for (const Tensor* t : {&l.token, &l.top, &l.values, &l.workspace})
    INGOT_CHECK(!*t || t->device == l.logits.device, "logprobs: found operands on ", t->device, " and ",
                l.logits.device, ", expected one device");
  INGOT_DISPATCH(SAMPLING, l.logits.device, logprobs, l, stream);
}

}  // namespace ingot
