#include "ingot/kernels/linear/cuda/activated.cuh"

namespace ingot::cuda {
template void launch_activated<bf16>(const Linear&, Stream);
template void launch_sloped<bf16>(const LinearBackward&, Stream);
}  // namespace ingot::cuda
