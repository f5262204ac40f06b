#include "ingot/gpu/gemm/core.cuh"
#include "ingot/kernels/muon/newton_schulz.cuh"

namespace ingot::cuda {
template Tensor launch_iteration<gemm::HopperCore>(const IterationBank&, const Coefficients&, Stream);
}
