#include "ingot/kernels/mlp/mlp_wide.cuh"

namespace ingot::cuda {

template void launch_mlp_wide_slopes<f16>(const Mlp&, const Tensor&, Stream);

}  // namespace ingot::cuda
