#include "ingot/models/decode/megakernel/megakernel.cuh"

namespace ingot::decode {
template struct RankMegakernel<WeightFormat::bf16>;
template struct RankMegakernel<WeightFormat::fp8>;
template struct RankMegakernel<WeightFormat::mxfp4>;
}  // namespace ingot::decode
