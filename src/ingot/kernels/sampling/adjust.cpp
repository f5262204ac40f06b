#include "ingot/kernels/sampling/adjust.h"

#include <limits>

#include "ingot/core/dispatch.h"

namespace ingot {
namespace cpu {
namespace {

template <class T> void adjust(const AdjustLogits& a) {
  const int64_t V = a.logits.numel(), n = a.bias_ids ? a.bias_ids.numel() : 0;
  const T* const from = a.logits.ptr<T>();
  T* const to = a.adjusted.ptr<T>();
  for (int64_t v = 0; v < V; ++v) to[v] = from[v];
  for (int64_t i = 0; i < n; ++i)
    if (const int32_t id = a.bias_ids.ptr<int32_t>()[i]; id < V) to[id] += T(a.biases.ptr<float>()[i]);
  if (!a.allowed) return;
  const uint32_t* const words = a.allowed.ptr<uint32_t>();
  for (int64_t v = 0; v < V; ++v)
    if ((words[v / 32] >> (v % 32) & 1) == 0) to[v] = -std::numeric_limits<T>::infinity();
}

}  // namespace

void adjust_logits(const AdjustLogits& a, Stream) {
  if (a.logits.dtype == DType::f64) return adjust<double>(a);
  adjust<float>(a);
}

}  // namespace cpu

namespace cuda {
void adjust_logits(const AdjustLogits& a, Stream stream);
}  // namespace cuda

void adjust_logits(const AdjustLogits& a, Stream stream) {
  const bool on_cpu = a.logits.device.kind == Device::cpu;
  INGOT_CHECK(a.logits.rank() == 1 && a.logits.numel() > 0 && a.logits.numel() <= INT32_MAX,
              "adjust_logits: found logits of shape ", a.logits.shape, ", expected (V) with 0 < V < 2^31");
  INGOT_CHECK(a.logits.dtype == DType::f32 || (on_cpu && a.logits.dtype == DType::f64),
              "adjust_logits: found logits in ", a.logits.dtype, ", expected f32", on_cpu ? " or f64" : "");
  INGOT_CHECK(a.adjusted.shape == a.logits.shape && a.adjusted.dtype == a.logits.dtype,
              "adjust_logits: found adjusted of shape ", a.adjusted.shape, " in ", a.adjusted.dtype, ", expected ",
              a.logits.shape, " in ", a.logits.dtype);
  INGOT_CHECK(bool(a.bias_ids) == bool(a.biases) &&
                  (!a.biases || (a.bias_ids.rank() == 1 && a.bias_ids.dtype == DType::i32 &&
                                 a.biases.shape == a.bias_ids.shape && a.biases.dtype == DType::f32)),
              "adjust_logits: found ids and biases of shapes ", a.bias_ids.shape, " and ", a.biases.shape,
              ", expected as many i32 as f32, or neither");
  const Shape words{(a.logits.numel() + 31) / 32};
  INGOT_CHECK(!a.allowed || (a.allowed.shape == words && a.allowed.dtype == DType::u32),
              "adjust_logits: found allowed of shape ", a.allowed.shape, " in ", a.allowed.dtype, ", expected ", words,
              " in u32");
  for (const Tensor* t : {&a.adjusted, &a.bias_ids, &a.biases, &a.allowed})
    INGOT_CHECK(!*t || t->device == a.logits.device, "adjust_logits: found operands on ", t->device, " and ",
                a.logits.device, ", expected one device");
  INGOT_DISPATCH(SAMPLING, a.logits.device, adjust_logits, a, stream);
}

}  // namespace ingot
