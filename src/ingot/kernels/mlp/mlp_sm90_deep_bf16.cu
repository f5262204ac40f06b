#include "ingot/kernels/mlp/mlp_sm90_deep.cuh"

namespace ingot::cuda {

template void launch_mlp_sm90_deep<bf16, false>(const Mlp&, Stream);
template void launch_mlp_sm90_deep<bf16, true>(const Mlp&, Stream);

}  // namespace ingot::cuda
