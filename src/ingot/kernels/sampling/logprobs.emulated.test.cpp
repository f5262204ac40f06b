#include "ingot/kernels/sampling/logprobs_cases.test.h"

namespace ingot {
namespace cuda {
int64_t logprobs_workspace_bytes(int64_t V, int64_t k, int64_t rows);
void logprobs(const Logprobs& l, Stream stream);
}  // namespace cuda
namespace {

TEST(LogprobsEmulated, EqualTheCpus) {
  sampling_cases::logprobs_are_the_cpus<testing::Buffer>(
      20000, [](const Logprobs& l) { cuda::logprobs(l, {}); }, cuda::logprobs_workspace_bytes);
}
TEST(LogprobsEmulated, OfSelectedRowsEqualTheCpus) {
  sampling_cases::logprobs_of_rows_are_the_cpus<testing::Buffer>([](const Logprobs& l) { cuda::logprobs(l, {}); },
                                                                 cuda::logprobs_workspace_bytes);
}

}  // namespace
}  // namespace ingot
