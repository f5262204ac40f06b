#include "ingot/models/decode/phased/phases.cuh"

namespace ingot::gpt_oss_decode {
template struct Phases<WeightFormat::fp8>;
}  // namespace ingot::gpt_oss_decode
