#include "ingot/kernels/mlp/mlp_sm90.cuh"

namespace ingot::cuda {

template void launch_mlp_sm90<f16, 64, false>(const Mlp&, Stream);
template void launch_mlp_sm90<f16, 128, false>(const Mlp&, Stream);

}  // namespace ingot::cuda
