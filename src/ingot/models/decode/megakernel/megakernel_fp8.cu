#include "ingot/models/decode/megakernel/megakernel.cuh"

namespace ingot::gpt_oss_decode {
template struct Megakernel<WeightFormat::fp8>;
}  // namespace ingot::gpt_oss_decode
