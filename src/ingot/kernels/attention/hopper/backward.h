#pragma once
// The arguments of the kernels of the backward pass. By default the first kernel walks over queries and computes dQ,
// the second walks over keys and computes dK and dV; both recompute P and dS. No sum is shared between blocks, and all
// sums have a fixed order. Two further forms compute P and dS once.
#include "ingot/kernels/attention/hopper/stored_scores.h"
#include "ingot/kernels/attention/hopper/walk.h"

namespace ingot::cuda::attention_hopper {

struct QueryGradientParams {
  Walk walk;
  ScoreParams scores;
  void* dq;
  Strides dq_strides;
};
struct QueryGradientKernel {
  void (*kernel)(const WalkMaps, const QueryGradientParams);
  int rows, keys, threads;
  int64_t smem;
};
template <class T> QueryGradientKernel query_gradient_kernel(int width, bool capped);

struct KeyGradientParams {
  Walk walk;  // places: of the keys; heads: key heads
  ScoreParams scores;
  int64_t query_rows;  // of q and dout
  void *dk, *dv;
  Strides dk_strides, dv_strides;
  bool add_dv;          // adds to the old value, which was rounded, too
  float* query_sums;    // sums of dQ (query_sums.cuh)
  StoredScores stored;  // dS (score_panels.h)
};
struct KeyGradientMaps {
  CUtensorMap q, dout, k, v;
};
struct KeyGradientKernel {
  void (*kernel)(const KeyGradientMaps, const KeyGradientParams);
  int keys, queries, threads;
  int64_t smem;
};
template <class T> KeyGradientKernel key_gradient_kernel(int width, bool capped);

// Whether the kernel that walks over keys also adds up dQ, in any order.
constexpr bool joins_gradients(int width, bool capped, bool deterministic) {
  return width <= 128 && !capped && !deterministic;
}
template <class T> KeyGradientKernel joint_gradient_kernel(int width);
struct QuerySumParams {
  const int32_t* cu_q;
  int segments, heads, width;
  const float* sums;
  float scale;
  void* dq;
  Strides dq_strides;
};
// Launched with a block of 128 threads for each place of 64 queries and each head.
template <class T> void (*query_sums_kernel(int width))(const QuerySumParams);

// For heads up to 128 wide without a cap: the kernel that walks over keys stores dS, and the second kernel computes dQ
// from dS.
template <class T> KeyGradientKernel storing_gradient_kernel();
struct QueryProductParams {
  Walk walk;
  StoredScores stored;
  int64_t key_places;  // of the walk over keys
  float scale;
  int width;
  void* dq;
  Strides dq_strides;
};
struct QueryProductKernel {
  void (*kernel)(const CUtensorMap, const QueryProductParams);
  int rows, keys, threads;
  int64_t smem;
};
template <class T> QueryProductKernel query_product_kernel();

}  // namespace ingot::cuda::attention_hopper
