#include "ingot/kernels/softcap/softcap.h"

#include <cmath>

#include "ingot/core/dispatch.h"

namespace ingot {
namespace cpu {
namespace {

template <class T> void softcap_typed(const Softcap& a) {
  using A = accum_t<T>;
  const A cap = A(a.cap);
  for (int64_t t = 0; t < a.x.rows(); ++t) {
    const T* x = a.x.ptr<T>() + t * a.x.row_stride();
    T* y = a.y.ptr<T>() + t * a.y.row_stride();
    for (int64_t c = 0; c < a.x.cols(); ++c) y[c] = T(cap * std::tanh(A(x[c]) / cap));
  }
}

}  // namespace

void softcap(const Softcap& a, Stream) {
  with_float_type(a.x.dtype, "softcap", [&](auto scalar) { softcap_typed<decltype(scalar)>(a); });
}

}  // namespace cpu

namespace cuda {
void softcap(const Softcap& a, Stream stream);
}  // namespace cuda

void softcap(const Softcap& a, Stream stream) {
  INGOT_CHECK(a.x.rank() > 0 && a.y.shape == a.x.shape, "softcap: found y of shape ", a.y.shape, ", expected ",
              a.x.shape, ", that of x");
  INGOT_CHECK_EQ(a.y.dtype, a.x.dtype, "softcap: dtype of y");
  INGOT_CHECK_EQ(a.y.device, a.x.device, "softcap: device of y");
  for (const Tensor* t : {&a.x, &a.y})
    INGOT_CHECK(t->rows_uniform() || t->numel() == 0,
                "softcap: found strides that one row stride cannot express, shape ", t->shape);
  INGOT_CHECK(a.cap > 0, "softcap: found cap ", a.cap, ", expected it above 0");
  INGOT_DISPATCH(SOFTCAP, a.x.device, softcap, a, stream);
}

}  // namespace ingot
