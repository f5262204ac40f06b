#pragma once
// The functions of rmsnorm.simd.cpp that rmsnorm.cpp calls, one row at a time. Plain structs, because the object files
// of every CPU level include them.
#include <cstdint>

namespace ingot::detail {

template <class A> struct RmsNormBackwardRow {
  int64_t n;
  const A *dy, *s, *w, *dsum;  // w and dsum may be null
  A *dx, *dw;                  // either may be null; dw is added to
  A rstd, scale, offset;       // offset: the constant added to w
  bool accumulate;             // dx is added to
};

}  // namespace ingot::detail
