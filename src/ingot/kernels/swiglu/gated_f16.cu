#include "ingot/gpu/gemm/core.cuh"
#include "ingot/kernels/swiglu/gated.cuh"

namespace ingot::cuda {
template void launch_gated<gemm::HopperCore, f16>(const GatedLinear&, Stream);
template void launch_gated_dx<gemm::HopperCore, f16>(const GatedGradients&, Stream);
template void launch_gated_dw<gemm::HopperCore, f16>(const GatedGradients&, Stream);
}  // namespace ingot::cuda
