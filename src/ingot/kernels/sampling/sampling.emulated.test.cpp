// The CUDA kernels of sampling on the CPU: run under sanitizers, and compared with the CPU's tokens.
#include "ingot/gpu/limits.h"
#include "ingot/kernels/sampling/sampling_cases.test.h"

namespace ingot {
namespace cuda {
int64_t sample_workspace_bytes(int64_t rows);
void sample(const Sample& s, const gpu::Limits& limits, Stream stream);
}  // namespace cuda
namespace {

using testing::Buffer;
constexpr sampling_cases::WorkspaceBytes kBytes = cuda::sample_workspace_bytes;

// On a Hopper, where a row with filters takes a cluster of blocks, and on an RTX 3090, where the row takes one block.
class SamplingEmulated : public ::testing::TestWithParam<const char*> {
 protected:
  const std::function<void(const Sample&)> emulated = [](const Sample& s) {
    gpu::Limits limits = gpu::limits_of(GetParam());
    limits.sms = 8;  // each block of a grid costs the emulator time
    cuda::sample(s, limits, {});
  };
};

TEST_P(SamplingEmulated, TokensAreTheCpus) { sampling_cases::tokens_are_the_cpus<Buffer>(1, kBytes, emulated); }
TEST_P(SamplingEmulated, CutsAmongEqualLogitsAreTheCpus) {
  sampling_cases::cuts_among_equal_logits_are_the_cpus<Buffer>(kBytes, emulated);
}
TEST_P(SamplingEmulated, RowsWithTheirOwnOptionsAreTheCpus) {
  sampling_cases::rows_with_their_own_options_are_the_cpus<Buffer>(kBytes, emulated);
}
TEST_P(SamplingEmulated, TokensOfAFullVocabularyAreTheCpus) {
  sampling_cases::tokens_of_a_full_vocabulary_are_the_cpus<Buffer>(1, 1, kBytes, emulated);
}
TEST_P(SamplingEmulated, RowsWithoutADistributionGiveMinusOne) {
  sampling_cases::rows_without_a_distribution_give_minus_one<Buffer>(kBytes, emulated);
}
TEST_P(SamplingEmulated, CallsOfAnyNumberOfRowsShareAWorkspace) {
  sampling_cases::calls_of_any_number_of_rows_share_a_workspace<Buffer>(kBytes, emulated);
}
TEST_P(SamplingEmulated, StepsAddUp) { sampling_cases::steps_add_up<Buffer>(kBytes, emulated); }
INSTANTIATE_TEST_SUITE_P(Gpus, SamplingEmulated, ::testing::Values("9.0", "8.6"));

}  // namespace
}  // namespace ingot
