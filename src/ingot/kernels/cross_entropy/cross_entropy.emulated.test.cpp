// The CUDA kernel of cross entropy on the CPU, where sanitizers see its accesses.
#include "ingot/kernels/cross_entropy/cross_entropy_cases.test.h"

namespace ingot {
namespace cuda {
void cross_entropy(const CrossEntropy& a, Stream stream);
}
namespace {

TEST(CrossEntropyEmulated, AgreesWithTheCpuInFp64) {
  const auto call = [](const CrossEntropy& a) { cuda::cross_entropy(a, {}); };
  cross_entropy_cases::agrees_with_fp64<testing::Buffer>(call);
  cross_entropy_cases::a_target_outside_gives_a_nan<testing::Buffer>(call);
  cross_entropy_cases::the_ignored_index_may_be_a_tokens<testing::Buffer>(call);
}
TEST(CrossEntropyEmulated, FromExponentialsAgreesWithTheCpuInFp64) {
  cross_entropy_cases::exponentials_agree_with_fp64<testing::Buffer>(
      [](const cuda::Exponentials& e, const CrossEntropy& a) { cuda::cross_entropy_of(e, a, {}); });
}

}  // namespace
}  // namespace ingot
