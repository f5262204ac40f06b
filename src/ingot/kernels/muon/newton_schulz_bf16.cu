#include "ingot/kernels/muon/newton_schulz.cuh"

namespace ingot::cuda {
template void launch_iteration<bf16>(const IterationBank&, Stream);
}
