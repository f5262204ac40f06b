#include "ingot/models/decode/phased/phases.cuh"

namespace ingot::decode {
template struct Phases<WeightFormat::fp8>;
}  // namespace ingot::decode
