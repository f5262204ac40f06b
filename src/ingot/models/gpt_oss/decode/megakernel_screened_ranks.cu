#include "ingot/models/gpt_oss/decode/megakernel.cuh"

namespace ingot::gpt_oss_decode {
template struct ScreenedRankMegakernel<WeightFormat::bf16>;
}  // namespace ingot::gpt_oss_decode
