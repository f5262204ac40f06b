#include "ingot/gpu/gemm/core.cuh"
#include "ingot/kernels/cross_entropy/capped.cuh"

namespace ingot::cuda {
template void launch_capped<gemm::HopperCore>(const Tensor&, const Tensor&, const Tensor&, double, const Capped&,
                                              Stream);
}  // namespace ingot::cuda
