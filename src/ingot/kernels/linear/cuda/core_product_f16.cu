#include "ingot/gpu/gemm/core.cuh"
#include "ingot/kernels/linear/cuda/core_product.cuh"

namespace ingot::cuda {
template void launch_core_product<gemm::HopperCore, f16>(const PlainProduct&, int, Stream);
}
