// The kernels that finish softcapped rows, on the CPU.
#include "ingot/kernels/cross_entropy/cross_entropy_cases.test.h"

namespace ingot {
namespace {

TEST(CappedEmulated, AgreesWithTheCpuInFp64) {
  cross_entropy_cases::capped_agrees_with_fp64<testing::Buffer>(
      [](const cuda::Capped& in, const Tensor& x, const CrossEntropy& a) { cuda::finish_capped(in, x, a, {}); });
}

}  // namespace
}  // namespace ingot
