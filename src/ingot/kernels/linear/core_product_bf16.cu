#include "ingot/kernels/linear/core_product.cuh"

namespace ingot::cuda {
template void launch_core_product<bf16>(const PlainProduct&, int, Stream);
}
