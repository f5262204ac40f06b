#include "ingot/kernels/mlp/mlp_few_rows_backward.cuh"

namespace ingot::cuda::few_rows_backward {

template void launch_chain<bf16>(const MlpChainMaps&, const Chain&, const ChainLaunch&, Stream);
template void launch_sums<bf16>(const MlpSumMaps&, const Sums&, const SumLaunch&, Stream);

}  // namespace ingot::cuda::few_rows_backward
