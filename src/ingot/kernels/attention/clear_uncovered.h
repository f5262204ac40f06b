#pragma once
// Zeros for the rows that no segment covers (padding behind the last segment): on a GPU the offsets are known to the
// device alone.
#include "ingot/core/tensor.h"

namespace ingot::cuda {

struct UncoveredRows {
  Tensor rows;  // (T, H, D) of a 16-bit type, whole 16 bytes: rows from cu's last entry on become 0; or left out
  Tensor cu;    // (S + 1) i32
  Tensor lse;   // (H, T) f32: becomes -inf there; or left out
};
// One launch for all of them.
void clear_uncovered(const char* op, const UncoveredRows& a, const UncoveredRows& b, const UncoveredRows& c,
                     Stream stream);

}  // namespace ingot::cuda
