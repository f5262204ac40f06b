#include "ingot/kernels/mlp/mlp_broad.cuh"

namespace ingot::cuda {

template void launch_mlp_broad<bf16, 224, true, false>(const Mlp&, Stream);
template void launch_mlp_broad<bf16, 224, true, true>(const Mlp&, Stream);

}  // namespace ingot::cuda
