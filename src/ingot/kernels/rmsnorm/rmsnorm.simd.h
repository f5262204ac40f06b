#pragma once
// What rmsnorm.cpp asks of rmsnorm.simd.cpp, one row at a time. Plain structs: every CPU level's object file sees them.
#include <cstdint>

namespace ingot::detail {

template <class A> struct RmsNormBackwardRow {
  int64_t n;
  const A *dy, *s, *w, *dsum;  // w and dsum may be null
  A *dx, *dw;                  // either may be null; dw is added to
  A rstd, scale, offset;       // offset: what is added to w
  bool accumulate;             // dx is added to
};

}  // namespace ingot::detail
