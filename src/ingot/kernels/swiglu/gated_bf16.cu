#include "ingot/kernels/swiglu/gated.cuh"

namespace ingot::cuda {
template void launch_gated<bf16>(const GatedLinear&, Stream);
template void launch_gated_dx<bf16>(const GatedGradients&, Stream);
template void launch_gated_dw<bf16>(const GatedGradients&, Stream);
}  // namespace ingot::cuda
