#include "ingot/models/decode/megakernel/megakernel.cuh"

namespace ingot::decode {
template struct TracedRankMegakernel<WeightFormat::bf16>;
template struct TracedRankMegakernel<WeightFormat::fp8>;
template struct TracedRankMegakernel<WeightFormat::mxfp4>;
}  // namespace ingot::decode
