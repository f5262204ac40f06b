// The CUDA kernel on the CPU, where sanitizers see its accesses.
#include "ingot/kernels/sum/sum_cases.test.h"

namespace ingot {
namespace cuda {
void sum(const Sum& a, Stream stream);
}
namespace {

TEST(SumEmulated, AddsToTheTotalInFp64) {
  sum_cases::adds_to_the_total<testing::Buffer>([](const Sum& a) { cuda::sum(a, {}); });
}

}  // namespace
}  // namespace ingot
