#include "ingot/kernels/mlp/mlp_portable.cuh"

namespace ingot::cuda {

template void launch_portable_forward<float>(const PortableRows&, const PortableConfig&, int, Stream);
template void launch_portable_chain<float>(const PortableRows&, const PortableConfig&, int, Stream);

}  // namespace ingot::cuda
