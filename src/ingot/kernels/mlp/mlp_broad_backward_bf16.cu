#include "ingot/kernels/mlp/mlp_broad_backward_chain.cuh"
#include "ingot/kernels/mlp/mlp_broad_backward_sums.cuh"

namespace ingot::cuda::broad_backward {

template void launch_chain<bf16, 192>(const MlpChainMaps&, const Chain&, const ChainLaunch&, Stream);
template void launch_chain<bf16, 224>(const MlpChainMaps&, const Chain&, const ChainLaunch&, Stream);
template void launch_chain<bf16, 256>(const MlpChainMaps&, const Chain&, const ChainLaunch&, Stream);
template void launch_sums<bf16, 192>(const MlpSumMaps&, const Sums&, int, Stream);
template void launch_sums<bf16, 224>(const MlpSumMaps&, const Sums&, int, Stream);
template void launch_sums<bf16, 256>(const MlpSumMaps&, const Sums&, int, Stream);

}  // namespace ingot::cuda::broad_backward
