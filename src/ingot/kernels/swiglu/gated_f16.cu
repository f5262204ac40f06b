#include "ingot/kernels/swiglu/gated.cuh"

namespace ingot::cuda {
template void launch_gated<f16>(const GatedLinear&, Stream);
template void launch_gated_dx<f16>(const GatedGradients&, Stream);
template void launch_gated_dw<f16>(const GatedGradients&, Stream);
}  // namespace ingot::cuda
