#include "ingot/kernels/mlp/mlp_wide.cuh"

namespace ingot::cuda {

extern template void launch_mlp_wide<f16, true>(const Mlp&, Stream);
template void launch_mlp_wide<f16, false>(const Mlp&, Stream);

}  // namespace ingot::cuda
