#include "ingot/kernels/mlp/mlp_sm90.cuh"

namespace ingot::cuda {

template void launch_mlp_sm90<f16, 64, true>(const Mlp&, Stream);

}  // namespace ingot::cuda
