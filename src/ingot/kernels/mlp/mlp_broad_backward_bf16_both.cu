#include "ingot/kernels/mlp/mlp_broad_backward_both.cuh"

namespace ingot::cuda::broad_backward {

template void launch_both<bf16, 192>(const BothMaps&, const Both&, const ChainLaunch&, Stream);
template void launch_both<bf16, 224>(const BothMaps&, const Both&, const ChainLaunch&, Stream);
template void launch_both<bf16, 256>(const BothMaps&, const Both&, const ChainLaunch&, Stream);

}  // namespace ingot::cuda::broad_backward
