#include "ingot/kernels/sum/sum_cases.test.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

class SumCuda : public testing::GpuTest<> {};

TEST_F(SumCuda, AddsToTheTotalInFp64Small) {
  sum_cases::adds_to_the_total<testing::DeviceBuffer>([](const Sum& a) { sum(a, {}); });
}

}  // namespace
}  // namespace ingot
