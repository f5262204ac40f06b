#include "ingot/kernels/attention/hopper/forward.cuh"

namespace ingot::cuda::attention_hopper {
template ForwardKernel forward_kernel<bf16>(int width, bool capped);
}  // namespace ingot::cuda::attention_hopper
