#pragma once
// What the kernels of the two fast forward forms share.
#include "ingot/gpu/ptx/memory.cuh"
#include "ingot/kernels/activation/activation.cuh"
#include "ingot/kernels/mlp/mlp_forward.h"
#include "ingot/kernels/mlp/mlp_weights.cuh"

namespace ingot::cuda {

// Zero where there is no bias, and beyond the last column.
template <class T> __device__ __forceinline__ float bias_element(const MlpLayerParams& layer, uint32_t n) {
  return layer.b != nullptr && n < layer.n ? tile::to_float(static_cast<const T*>(layer.b)[n]) : 0.f;
}

}  // namespace ingot::cuda
