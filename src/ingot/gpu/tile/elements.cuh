#pragma once
// N neighbouring elements as floats, in vectors; single elements, N = 1, from any address.
#include "ingot/gpu/tile/vec.cuh"

namespace ingot::tile {

template <class T, int N> __device__ inline void load_elements(float (&x)[N], const T* from) {
  if constexpr (N == 1) {
    x[0] = to_float(*from);
  } else {
    Vec<T, N> v;
    load(v, from);
    to_float(v, x);
  }
}
template <class T, int N> __device__ inline void store_elements(T* to, const float (&x)[N]) {
  if constexpr (N == 1)
    *to = from_float<T>(x[0]);
  else
    store(to, from_float<T>(x), false);
}

}  // namespace ingot::tile
