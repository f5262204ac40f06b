#include "ingot/models/decode/megakernel/megakernel.cuh"

namespace ingot::decode {
template struct Megakernel<WeightFormat::bf16>;
}  // namespace ingot::decode
