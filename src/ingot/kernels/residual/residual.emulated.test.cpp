// The CUDA kernels of residual ops on the CPU, where sanitizers see their accesses.
#include "ingot/kernels/residual/residual_cases.test.h"

namespace ingot::cuda {
void axpby(const Axpby& a, Stream stream);
void mix(const Mix& a, Stream stream);
void mix_backward(const MixBackward& a, Stream stream);
void scaled_add(const ScaledAdd& a, Stream stream);
void scaled_add_backward(const ScaledAddBackward& a, Stream stream);
void skip_merge(const SkipMerge& a, Stream stream);
void skip_merge_backward(const SkipMergeBackward& a, Stream stream);
void lane_write(const LaneWrite& a, Stream stream);
void lane_write_backward(const LaneWriteBackward& a, Stream stream);
}  // namespace ingot::cuda
namespace ingot::residual_cases {
namespace {

struct CudaOps {
  static void axpby(const Axpby& a, Stream s) { cuda::axpby(a, s); }
  static void mix(const Mix& a, Stream s) { cuda::mix(a, s); }
  static void mix_backward(const MixBackward& a, Stream s) { cuda::mix_backward(a, s); }
  static void scaled_add(const ScaledAdd& a, Stream s) { cuda::scaled_add(a, s); }
  static void scaled_add_backward(const ScaledAddBackward& a, Stream s) { cuda::scaled_add_backward(a, s); }
  static void skip_merge(const SkipMerge& a, Stream s) { cuda::skip_merge(a, s); }
  static void skip_merge_backward(const SkipMergeBackward& a, Stream s) { cuda::skip_merge_backward(a, s); }
  static void lane_write(const LaneWrite& a, Stream s) { cuda::lane_write(a, s); }
  static void lane_write_backward(const LaneWriteBackward& a, Stream s) { cuda::lane_write_backward(a, s); }
};

TEST(ResidualEmulated, AgreesWithTheCpuInFp64) {
  const auto forward = forward_cases<CudaOps>(), host_forward = forward_cases<>();
  const auto backward = backward_cases<CudaOps>(), host_backward = backward_cases<>();
  for (DType type : {DType::f32, DType::bf16, DType::f16})
    for (const Size& s : {Size{0, 5, 0}, {1, 7, 2}, {5, 8, 0}, {37, 136, 8}, {3, 2056, 0}}) {
      for (size_t i = 0; i < forward.size(); ++i) expect_agrees<testing::Buffer>(forward[i], host_forward[i], type, s);
      for (size_t i = 0; i < backward.size(); ++i)
        expect_agrees<testing::Buffer>(backward[i].op, host_backward[i].op, type, s);
    }
}

}  // namespace
}  // namespace ingot::residual_cases
