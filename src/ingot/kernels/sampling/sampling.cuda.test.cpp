#include "ingot/kernels/sampling/logprobs_cases.test.h"
#include "ingot/kernels/sampling/sampling_cases.test.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

class SamplingCuda : public testing::GpuTest<> {};
const auto on_gpu = [](const Sample& s) { sample(s, {}); };
int64_t bytes_on_gpu(int64_t rows) { return sample_workspace_bytes(rows, {Device::cuda, 0}); }
using testing::DeviceBuffer;

TEST_F(SamplingCuda, TokensOfTwoRowsAreTheCpus) {
  sampling_cases::tokens_are_the_cpus<DeviceBuffer>(2, bytes_on_gpu, on_gpu);
}
TEST_F(SamplingCuda, CutsAmongEqualLogitsAreTheCpus) {
  sampling_cases::cuts_among_equal_logits_are_the_cpus<DeviceBuffer>(bytes_on_gpu, on_gpu);
}
// For compute-sanitizer. Racecheck is slow where rows with filters have many blocks. On an H200 it took 98 s for
// RowsWithoutADistributionGiveMinusOneSmall, which has one launch with four such rows, and 37 s for the two tests of 18
// rows. The more rows, the fewer blocks each has: with the clusters of an H200 that sampling.test.cpp lists,
// pick_filter_cluster() gives 16 blocks to each of four rows, and five to each of 18 rows.
constexpr int64_t kRowsOfFourBlocks = 18;
TEST_F(SamplingCuda, SomeTokensAreTheCpusSmall) {
  sampling_cases::tokens_are_the_cpus<DeviceBuffer>(kRowsOfFourBlocks, bytes_on_gpu, on_gpu, 8);
}
TEST_F(SamplingCuda, SomeCutsAmongEqualLogitsAreTheCpusSmall) {
  sampling_cases::cuts_among_equal_logits_are_the_cpus<DeviceBuffer>(bytes_on_gpu, on_gpu, kRowsOfFourBlocks, 2);
}
TEST_F(SamplingCuda, RowsWithTheirOwnOptionsAreTheCpusSmall) {
  sampling_cases::rows_with_their_own_options_are_the_cpus<DeviceBuffer>(bytes_on_gpu, on_gpu);
}
TEST_F(SamplingCuda, RowsWithoutADistributionGiveMinusOneSmall) {
  sampling_cases::rows_without_a_distribution_give_minus_one<DeviceBuffer>(bytes_on_gpu, on_gpu);
}
TEST_F(SamplingCuda, CallsOfAnyNumberOfRowsShareAWorkspace) {
  sampling_cases::calls_of_any_number_of_rows_share_a_workspace<DeviceBuffer>(bytes_on_gpu, on_gpu);
}
TEST_F(SamplingCuda, StepsAddUpSmall) { sampling_cases::steps_add_up<DeviceBuffer>(bytes_on_gpu, on_gpu); }
TEST_F(SamplingCuda, TokensAreTheCpus) { sampling_cases::tokens_are_the_cpus<DeviceBuffer>(100, bytes_on_gpu, on_gpu); }
TEST_F(SamplingCuda, TokensOfAFullVocabularyAreTheCpus) {
  sampling_cases::tokens_of_a_full_vocabulary_are_the_cpus<DeviceBuffer>(16, 4, bytes_on_gpu, on_gpu);
}

int64_t logprob_bytes_on_gpu(int64_t V, int64_t k, int64_t rows) {
  return logprobs_workspace_bytes(V, k, {Device::cuda, 0}, rows);
}
TEST_F(SamplingCuda, LogprobsAreTheCpus) {
  sampling_cases::logprobs_are_the_cpus<DeviceBuffer>(
      201088, [](const Logprobs& l) { logprobs(l, {}); }, logprob_bytes_on_gpu);
}
TEST_F(SamplingCuda, LogprobsOfRowsAreTheCpusSmall) {
  sampling_cases::logprobs_of_rows_are_the_cpus<DeviceBuffer>([](const Logprobs& l) { logprobs(l, {}); },
                                                              logprob_bytes_on_gpu);
}

}  // namespace
}  // namespace ingot
