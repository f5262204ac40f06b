#include "ingot/kernels/mlp/mlp_portable.cuh"

namespace ingot::cuda {

template void launch_portable_grad<float>(const PortableGrad&, int, Stream);

}  // namespace ingot::cuda
