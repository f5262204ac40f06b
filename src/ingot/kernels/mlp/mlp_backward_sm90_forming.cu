// The fast backward pass where values are formed again, or were kept in fp32.
#include "ingot/kernels/mlp/mlp_backward_sm90_forming.cuh"

namespace ingot::cuda::backward_sm90 {

Kernel forming_kernel(DType type, int panels) {
  if (type == DType::f16) return panels == 2 ? mlp_backward_kernel<f16, 2> : mlp_backward_kernel<f16, 1>;
  return panels == 2 ? mlp_backward_kernel<bf16, 2> : mlp_backward_kernel<bf16, 1>;
}

}  // namespace ingot::cuda::backward_sm90
