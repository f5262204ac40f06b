#pragma once
// The two forms of the kernels: Hopper's, and the portable one.
#include "ingot/gpu/limits.h"
#include "ingot/kernels/grouped/grouped_kernel.h"

namespace ingot::grouped {

// The caller requests the gate by the type of the result.
inline bool is_gated(const GroupedLinear& a) { return a.y.dtype == DType::bf16; }
// grouped_linear() for a GPU with the given limits, which tests choose.
void launch(const GroupedLinear& a, const gpu::Limits& limits, Stream stream);
// All fields of `product` are set except tile_rows.
void launch_hopper(const GroupedLinear& a, const Product& product, Stream stream);
void launch_portable(const GroupedLinear& a, const Product& product, const gpu::Limits& limits, Stream stream);

}  // namespace ingot::grouped
