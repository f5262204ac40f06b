#include "ingot/models/decode/megakernel/megakernel.cuh"

namespace ingot::decode {
template struct Megakernel<WeightFormat::mxfp4>;
}  // namespace ingot::decode
