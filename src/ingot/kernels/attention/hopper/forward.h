#pragma once
// The interface between the forward kernels (forward.cuh) and the launcher (launch.cu).
#include "ingot/kernels/attention/hopper/walk.h"

namespace ingot::cuda::attention_hopper {

// A kernel and its launch parameters. capped: for a softcap, and for scales <= 0.
struct ForwardKernel {
  void (*kernel)(const WalkMaps, const ForwardParams);
  int rows, keys, threads;
  int64_t smem;
};
template <class T> ForwardKernel forward_kernel(int width, bool capped);

}  // namespace ingot::cuda::attention_hopper
