#include "ingot/kernels/mlp/mlp_broad_few_rows.cuh"

namespace ingot::cuda {

template void launch_mlp_broad_few_rows<bf16>(const Mlp&, int, Stream);

}  // namespace ingot::cuda
