#include "ingot/models/decode/megakernel/megakernel.cuh"

namespace ingot::decode {
template struct ScreenedRankMegakernel<WeightFormat::bf16>;
}  // namespace ingot::decode
