#include "ingot/kernels/mlp/mlp_portable.cuh"

namespace ingot::cuda {

template void launch_portable_forward<f16>(const PortableRows&, const PortableConfig&, int, Stream);
template void launch_portable_chain<f16>(const PortableRows&, const PortableConfig&, int, Stream);
template void launch_portable_grad<f16>(const PortableGrad&, int, Stream);

}  // namespace ingot::cuda
