#include "ingot/kernels/mlp/mlp_wide.cuh"

namespace ingot::cuda {

template void launch_mlp_wide<f16, MlpWideKernel::rare>(const Mlp&, Stream);

}  // namespace ingot::cuda
