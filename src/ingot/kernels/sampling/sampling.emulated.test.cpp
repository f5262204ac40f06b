// The CUDA kernel of sampling on the CPU: what a sanitizer can see of it, and that it draws what the CPU does.
#include "ingot/kernels/sampling/sampling_cases.test.h"

namespace ingot {
namespace cuda {
void sample(const Sample& s, Stream stream);
}  // namespace cuda
namespace {

const auto emulated = [](const Sample& s) { cuda::sample(s, {}); };

TEST(SamplingEmulated, DrawsAreTheCpus) { sampling_cases::draws_are_the_cpus<testing::Buffer>(1, emulated); }
TEST(SamplingEmulated, DrawsOfAFullVocabularyAreTheCpus) {
  sampling_cases::draws_of_a_full_vocabulary_are_the_cpus<testing::Buffer>(1, emulated);
}
TEST(SamplingEmulated, RowsWithoutADistributionGiveMinusOne) {
  sampling_cases::rows_without_a_distribution_give_minus_one<testing::Buffer>(emulated);
}

}  // namespace
}  // namespace ingot
