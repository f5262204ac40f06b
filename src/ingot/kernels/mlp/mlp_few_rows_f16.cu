#include "ingot/kernels/mlp/mlp_few_rows.cuh"

namespace ingot::cuda {

template void launch_mlp_few_rows<f16, false>(const Mlp&, Stream);

}  // namespace ingot::cuda
