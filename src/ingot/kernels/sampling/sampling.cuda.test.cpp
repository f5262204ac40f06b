#include "ingot/kernels/sampling/logits_cases.test.h"
#include "ingot/kernels/sampling/sampling_cases.test.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

class SamplingCuda : public testing::GpuTest<> {};
const auto on_gpu = [](const Sample& s) { sample(s, {}); };

TEST_F(SamplingCuda, DrawsAreTheCpusSmall) { sampling_cases::draws_are_the_cpus<testing::DeviceBuffer>(2, on_gpu); }
TEST_F(SamplingCuda, RowsWithoutADistributionGiveMinusOneSmall) {
  sampling_cases::rows_without_a_distribution_give_minus_one<testing::DeviceBuffer>(on_gpu);
}
TEST_F(SamplingCuda, StepsAddUpSmall) { sampling_cases::steps_add_up<testing::DeviceBuffer>(on_gpu); }
TEST_F(SamplingCuda, DrawsAreTheCpus) { sampling_cases::draws_are_the_cpus<testing::DeviceBuffer>(100, on_gpu); }
TEST_F(SamplingCuda, DrawsOfAFullVocabularyAreTheCpus) {
  sampling_cases::draws_of_a_full_vocabulary_are_the_cpus<testing::DeviceBuffer>(8, on_gpu);
}

TEST_F(SamplingCuda, AdjustedLogitsAreTheCpusSmall) {
  sampling_cases::adjusted_logits_are_the_cpus<testing::DeviceBuffer>(
      [](const AdjustLogits& a) { adjust_logits(a, {}); });
}
TEST_F(SamplingCuda, LogprobsAreTheCpus) {
  sampling_cases::logprobs_are_the_cpus<testing::DeviceBuffer>(
      201088, [](const Logprobs& l) { logprobs(l, {}); },
      [](int64_t V, int64_t k) {
        return logprobs_workspace_bytes(V, k, {Device::cuda, 0});
      });
}

}  // namespace
}  // namespace ingot
