#include "ingot/kernels/mlp/mlp_wide_backward_chain.cuh"
#include "ingot/kernels/mlp/mlp_wide_backward_sums.cuh"

namespace ingot::cuda::wide_backward {

template void launch_chain<bf16>(const MlpChainMaps&, const Chain&, const ChainLaunch&, Stream);
template void launch_sums<bf16>(const MlpSumMaps&, const Sums&, const SumLaunch&, Stream);

}  // namespace ingot::cuda::wide_backward
