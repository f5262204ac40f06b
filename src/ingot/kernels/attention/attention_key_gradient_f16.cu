#include "ingot/kernels/attention/hopper/key_gradient.cuh"

namespace ingot::cuda::attention_hopper {
template KeyGradientKernel key_gradient_kernel<f16>(int width, bool capped);
}  // namespace ingot::cuda::attention_hopper
