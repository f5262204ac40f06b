// The CUDA kernels of an optimizer's small updates on the CPU, where sanitizers see their accesses.
#include "ingot/kernels/adamw/adamw_cases.test.h"

namespace ingot {
namespace cuda {
void adamw(const AdamW& a, Stream stream);
void ema(const Ema& e, Stream stream);
void sum_of_squares(const SumOfSquares& a, Stream stream);
void clip_factor(const ClipFactor& a, Stream stream);
int64_t sum_of_squares_workspace_bytes(int64_t numbers);
}  // namespace cuda
namespace {

struct CudaOps {
  static void adamw(const AdamW& a) { cuda::adamw(a, {}); }
  static void ema(const Ema& a) { cuda::ema(a, {}); }
  static void sum_of_squares(SumOfSquares a) {
    testing::Buffer room(DType::u8, {cuda::sum_of_squares_workspace_bytes(a.x.numel())});
    a.workspace = room;
    cuda::sum_of_squares(a, {});
    EXPECT_TRUE(room.guards_intact());
  }
  static void clip_factor(const ClipFactor& a) { cuda::clip_factor(a, {}); }
};

TEST(AdamWEmulated, FollowsTheCpuInFp64) { adamw_cases::everything_holds<CudaOps, testing::Buffer>(); }

}  // namespace
}  // namespace ingot
