#pragma once
// What rope.cpp asks of rope.simd.cpp: the heads of one token in f32. Plain structs: every CPU level's object file sees
// them.
#include <cstdint>

namespace ingot::detail {

struct RopeToken {
  const float *x, *dy;  // dy: backward only
  float* y;             // or dx; may be x, or dy
  int64_t heads, d, x_head, dy_head, y_head;
  const float *cos, *sin;  // this token's row of the table
  int64_t half;            // pairs that turn; 0: none
  float sign, eps;
  bool interleaved, normalise;
  const float* gain;  // (heads) or null
  float* dgain;       // (heads) added to, or null
  float* scratch;     // d floats, backward only
};

}  // namespace ingot::detail
