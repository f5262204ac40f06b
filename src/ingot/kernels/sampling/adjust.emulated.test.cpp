#include "ingot/kernels/sampling/logits_cases.test.h"

namespace ingot {
namespace cuda {
void adjust_logits(const AdjustLogits& a, Stream stream);
}  // namespace cuda
namespace {

TEST(AdjustLogitsEmulated, TheyAreTheCpus) {
  sampling_cases::adjusted_logits_are_the_cpus<testing::Buffer>(
      [](const AdjustLogits& a) { cuda::adjust_logits(a, {}); });
}

}  // namespace
}  // namespace ingot
