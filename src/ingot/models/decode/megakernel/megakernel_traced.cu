#include "ingot/models/decode/megakernel/megakernel.cuh"

namespace ingot::decode {
template struct TracedMegakernel<WeightFormat::bf16>;
template struct TracedMegakernel<WeightFormat::fp8>;
template struct TracedMegakernel<WeightFormat::mxfp4>;
}  // namespace ingot::decode
