#include "ingot/kernels/mlp/mlp_sm90_plain.cuh"

namespace ingot::cuda {

template void launch_mlp_sm90_plain<bf16, true>(const Mlp&, Stream);

}  // namespace ingot::cuda
