#include "ingot/gpu/gemm/core.cuh"
#include "ingot/kernels/muon/newton_schulz.cuh"

namespace ingot::cuda {
template void launch_iteration<gemm::HopperCore, bf16>(const IterationBank&, Stream);
}
