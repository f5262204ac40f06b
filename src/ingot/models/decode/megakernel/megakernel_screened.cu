#include "ingot/models/decode/megakernel/megakernel.cuh"

namespace ingot::decode {
template struct ScreenedMegakernel<WeightFormat::bf16>;
}  // namespace ingot::decode
