#pragma once
// The two forms of the kernels: Hopper's, and the portable one.
#include "ingot/gpu/limits.h"
#include "ingot/kernels/grouped/grouped_kernel.h"

namespace ingot::grouped {

// A gate is asked for by the type of its result.
inline bool is_gated(const GroupedLinear& a) { return a.y.dtype == DType::bf16; }
// grouped_linear() with the limits of a GPU, which tests choose.
void launch(const GroupedLinear& a, const gpu::Limits& limits, Stream stream);
// `product` is complete but for tile_rows.
void launch_hopper(const GroupedLinear& a, const Product& product, Stream stream);
void launch_portable(const GroupedLinear& a, const Product& product, const gpu::Limits& limits, Stream stream);

}  // namespace ingot::grouped
