#pragma once
// Plain structs shared by swiglu.cpp and every CPU level of swiglu.simd.cpp.
#include <cstdint>

namespace ingot::detail {

struct GateConstants {
  float limit, alpha, up_offset, cubic;  // limit is infinite where there is no clamp
};

}  // namespace ingot::detail
