#include "ingot/kernels/mlp/mlp_wide.cuh"

namespace ingot::cuda {

extern template void launch_mlp_wide<bf16, MlpWideKernel::rare>(const Mlp&, Stream);
template void launch_mlp_wide<bf16, MlpWideKernel::values>(const Mlp&, Stream);

}  // namespace ingot::cuda
