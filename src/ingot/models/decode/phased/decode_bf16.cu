#include "ingot/models/decode/phased/phases.cuh"

namespace ingot::gpt_oss_decode {
template struct Phases<WeightFormat::bf16>;
}  // namespace ingot::gpt_oss_decode
