#include "ingot/models/decode/phased/phases.cuh"

namespace ingot::decode {
template struct Phases<WeightFormat::bf16>;
}  // namespace ingot::decode
