// The CUDA kernels of sampling on the CPU: run under sanitizers, and compared with the CPU's tokens.
#include "ingot/kernels/sampling/sampling_cases.test.h"

namespace ingot {
namespace cuda {
int64_t sample_workspace_bytes(int64_t rows);
void sample(const Sample& s, Stream stream);
}  // namespace cuda
namespace {

using testing::Buffer;
constexpr sampling_cases::WorkspaceBytes kBytes = cuda::sample_workspace_bytes;
const auto emulated = [](const Sample& s) { cuda::sample(s, {}); };

TEST(SamplingEmulated, TokensAreTheCpus) { sampling_cases::tokens_are_the_cpus<Buffer>(1, kBytes, emulated); }
TEST(SamplingEmulated, CutsAmongEqualLogitsAreTheCpus) {
  sampling_cases::cuts_among_equal_logits_are_the_cpus<Buffer>(kBytes, emulated);
}
TEST(SamplingEmulated, RowsWithTheirOwnOptionsAreTheCpus) {
  sampling_cases::rows_with_their_own_options_are_the_cpus<Buffer>(kBytes, emulated);
}
TEST(SamplingEmulated, TokensOfAFullVocabularyAreTheCpus) {
  sampling_cases::tokens_of_a_full_vocabulary_are_the_cpus<Buffer>(1, 1, kBytes, emulated);
}
TEST(SamplingEmulated, RowsWithoutADistributionGiveMinusOne) {
  sampling_cases::rows_without_a_distribution_give_minus_one<Buffer>(kBytes, emulated);
}
TEST(SamplingEmulated, StepsAddUp) { sampling_cases::steps_add_up<Buffer>(kBytes, emulated); }

}  // namespace
}  // namespace ingot
