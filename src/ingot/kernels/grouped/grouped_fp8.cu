#include "ingot/kernels/grouped/grouped.cuh"

namespace ingot::grouped {
template void launch<WeightFormat::fp8>(const Params&, const TileShape&, bool, int64_t, int, Stream);
}  // namespace ingot::grouped
