#include "ingot/gpu/gemm/core.cuh"
#include "ingot/kernels/linear/cuda/activated.cuh"

namespace ingot::cuda {
template void launch_activated<gemm::HopperCore, bf16>(const Linear&, Stream);
template void launch_sloped<gemm::HopperCore, bf16>(const LinearBackward&, Stream);
}  // namespace ingot::cuda
