#pragma once
// Zeros the rows outside all segments (padding after the last segment). On a GPU only the device knows the offsets.
#include "ingot/core/tensor.h"

namespace ingot::cuda {

struct UncoveredRows {
  Tensor rows;  // (T, H, D) of a 16-bit type, whole 16 bytes: rows from cu's last entry on become 0; or left out
  Tensor cu;    // (S + 1) i32
  Tensor lse;   // (H, T) f32: becomes -inf there; or left out
};
// A single launch clears all tensors.
void clear_uncovered(const char* op, const UncoveredRows& a, const UncoveredRows& b, const UncoveredRows& c,
                     Stream stream);

}  // namespace ingot::cuda
