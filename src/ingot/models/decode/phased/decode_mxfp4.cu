#include "ingot/models/decode/phased/phases.cuh"

namespace ingot::decode {
template struct Phases<WeightFormat::mxfp4>;
}  // namespace ingot::decode
