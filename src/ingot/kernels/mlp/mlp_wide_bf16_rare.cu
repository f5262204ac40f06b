#include "ingot/kernels/mlp/mlp_wide.cuh"

namespace ingot::cuda {

template void launch_mlp_wide<bf16, true>(const Mlp&, Stream);

}  // namespace ingot::cuda
