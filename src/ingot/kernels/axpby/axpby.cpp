#include "ingot/kernels/axpby/axpby.h"

#include "ingot/kernels/residual/rows.h"

namespace ingot {

using namespace residual;

namespace cpu {
namespace {

template <class T> void axpby_typed(const Axpby& a) {
  const int64_t C = a.x.cols();
  const Rows<T> X(a.x), Y(a.y);
  const T alpha = T(a.alpha), beta = T(a.beta);
  for_blocks(a.x.rows(), C, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* x = X[t];
      T* y = Y[t];
      if (beta == 0) {  // y may have any contents
        INGOT_POINTWISE
        for (int64_t c = 0; c < C; ++c) y[c] = alpha * x[c];
      } else {
        INGOT_POINTWISE
        for (int64_t c = 0; c < C; ++c) y[c] = alpha * x[c] + beta * y[c];
      }
    }
  });
}

}  // namespace

void axpby(const Axpby& a, Stream) {
  with_wide_float_type(a.x.dtype, "axpby", [&](auto scalar) { axpby_typed<decltype(scalar)>(a); });
}

}  // namespace cpu

namespace cuda {
void axpby(const Axpby& a, Stream stream);
}  // namespace cuda

void axpby(const Axpby& a, Stream stream) {
  check_matrix(a.x, a.x, "axpby: x");
  check_matrix(a.y, a.x, "axpby: y");
  INGOT_DISPATCH(AXPBY, a.x.device, axpby, a, stream);
}

}  // namespace ingot
