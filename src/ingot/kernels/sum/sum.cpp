#include "ingot/kernels/sum/sum.h"

#include "ingot/core/dispatch.h"

namespace ingot {
namespace cpu {

void sum(const Sum& a, Stream) {
  double& total = *a.total.ptr<double>();
  with_wide_float_type(a.x.dtype, "sum", [&](auto scalar) {
    const auto* x = a.x.ptr<decltype(scalar)>();
    for (int64_t i = 0; i < a.x.numel(); ++i) total += double(x[i]);
  });
}

}  // namespace cpu

namespace cuda {
void sum(const Sum& a, Stream stream);
}  // namespace cuda

void sum(const Sum& a, Stream stream) {
  INGOT_CHECK(a.x.rank() == 1 && a.x.contiguous(), "sum: found x of shape ", a.x.shape, ", expected it flat");
  INGOT_CHECK(a.total.dtype == DType::f64 && a.total.shape == Shape{1}, "sum: found total of ", a.total.dtype,
              " and shape ", a.total.shape, ", expected one f64");
  INGOT_CHECK_EQ(a.total.device, a.x.device, "sum: device of total");
  INGOT_DISPATCH(SUM, a.x.device, sum, a, stream);
}

}  // namespace ingot
