#include "ingot/kernels/adamw/adamw_cases.test.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

class AdamWCuda : public testing::GpuTest<> {};

struct PublicOps {
  static void adamw(const AdamW& a) { ingot::adamw(a, {}); }
  static void ema(const Ema& a) { ingot::ema(a, {}); }
  static void sum_of_squares(const SumOfSquares& a) { ingot::sum_of_squares(a, {}); }
  static void clip_factor(const ClipFactor& a) { ingot::clip_factor(a, {}); }
};

TEST_F(AdamWCuda, FollowsTheCpuInFp64Small) { adamw_cases::everything_holds<PublicOps, testing::DeviceBuffer>(); }

}  // namespace
}  // namespace ingot
