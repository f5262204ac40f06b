#include "ingot/kernels/attention/hopper/query_gradient.cuh"

namespace ingot::cuda::attention_hopper {
template QueryGradientKernel query_gradient_kernel<bf16>(int width, bool capped);
}  // namespace ingot::cuda::attention_hopper
