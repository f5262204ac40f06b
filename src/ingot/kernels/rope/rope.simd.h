#pragma once
// The functions of rope.simd.cpp that rope.cpp calls: the heads of a token in f32. Plain structs, because the object
// files of every CPU level include them.
#include <cstdint>

namespace ingot::detail {

struct RopeToken {
  const float *x, *dy;  // dy: backward only
  float* y;             // or dx; may be x, or dy
  int64_t heads, d, x_head, dy_head, y_head;
  const float *cos, *sin;  // this token's row of the table
  int64_t half;            // rotated pairs; 0: none
  float sign, eps;
  bool interleaved, normalise;
  const float* gain;  // (heads) or null
  float* dgain;       // (heads) added to, or null
  float* scratch;     // d floats, backward only
};

}  // namespace ingot::detail
