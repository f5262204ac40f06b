#include "ingot/models/decode/megakernel/megakernel.cuh"

namespace ingot::decode {
template struct Megakernel<WeightFormat::fp8>;
}  // namespace ingot::decode
