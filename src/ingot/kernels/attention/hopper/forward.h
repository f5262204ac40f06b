#pragma once
// The arguments of the forward kernels (forward.cuh), passed by the launcher (attention.cu).
#include "ingot/kernels/attention/hopper/walk.h"

namespace ingot::cuda::attention_hopper {

struct ForwardParams {
  Walk walk;
  void* out;
  Strides out_strides;
  float* lse;  // (H, Tq), rows lse_stride apart; null: not wanted
  int64_t lse_stride;
  const void* sinks;  // (H) of T or f32; null: none
  bool sinks_f32;
  int width;              // of a head, a multiple of 8
  float scale_log2;       // of a score, to powers of two
  float cap_in, cap_out;  // capped: cap_out * tanh(cap_in * score), in powers of two; cap_out = 0: cap_in * score
};

// A kernel and its launch parameters. capped: for a softcap, and for scales <= 0.
struct ForwardKernel {
  void (*kernel)(const WalkMaps, const ForwardParams);
  int rows, keys, threads;
  int64_t smem;
};
template <class T> ForwardKernel forward_kernel(int width, bool capped);

}  // namespace ingot::cuda::attention_hopper
