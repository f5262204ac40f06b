#include "ingot/kernels/mlp/mlp_wide_backward.cuh"

namespace ingot::cuda::wide_backward {

template void launch<bf16>(const Maps&, const Arguments&, const LaunchAt&, Stream);

}  // namespace ingot::cuda::wide_backward
