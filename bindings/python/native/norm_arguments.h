#pragma once
// The arguments of the calls of RMSNorm from Python, for declared.cpp.
#include <initializer_list>

#include "declare.h"
#include "ingot/kernels/rmsnorm/rmsnorm.h"

namespace ingot::python {

// Operands with fully mergeable rows take the (T, H, C) shape of an operand without.
inline void share_shape(std::initializer_list<Tensor*> operands) {
  const Tensor* split = nullptr;
  for (const Tensor* t : operands)
    if (t->rank() == 3) split = t;
  if (split == nullptr) return;
  const int64_t tokens = split->size(0), heads = split->size(1);
  for (Tensor* t : operands) {
    if (t->rank() != 2 || t->size(0) != tokens * heads) continue;
    Tensor s = *t;
    s.shape = {tokens, heads, t->size(1)};
    s.stride[0] = heads * t->stride[0];
    s.stride[1] = t->stride[0];
    s.stride[2] = t->stride[1];
    *t = s;
  }
}

// Refuses a weight that does not fit x, by its name in ingot.functional.rms_norm.
inline void check_weight(const Tensor& x, const Tensor& w) {
  if (!w) return;
  const bool wide = x.dtype == DType::f64;
  INGOT_CHECK(w.numel() == x.cols(), "rms_norm: weight: found ", w.numel(), " elements, expected ", x.cols(),
              ", the columns of x");
  INGOT_CHECK(wide ? w.dtype == DType::f64 : w.dtype == DType::f32 || w.dtype == DType::bf16 || w.dtype == DType::f16,
              "rms_norm: weight: found dtype ", torch_name(w.dtype), " beside x of ", torch_name(x.dtype),
              ", expected ", wide ? "torch.float64" : "torch.float32, torch.bfloat16 or torch.float16");
  INGOT_CHECK(w.device == x.device, "rms_norm: weight: found a tensor on ", w.device, ", expected x's ", x.device);
}

inline bool complete(const char*, RmsNorm& a) {
  check_weight(a.x, a.w);
  share_shape({&a.x, &a.residual, &a.sum, &a.y});
  return a.x.cols() > 0;
}
inline bool complete(const char*, RmsNormBackward& a) {
  share_shape({&a.dy, &a.s, &a.dsum, &a.dx});
  return a.s.cols() > 0;
}

}  // namespace ingot::python
