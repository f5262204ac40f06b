#include "ingot/gpu/gemm/core.cuh"
#include "ingot/kernels/cross_entropy/exponentials.cuh"

namespace ingot::cuda {
template void launch_exponentials<gemm::HopperCore, bf16>(const Tensor&, const Tensor&, const Tensor&, double,
                                                          const Exponentials&, Stream);
}  // namespace ingot::cuda
