#pragma once
// What the launcher hands to the kernels of the backward pass: one walks over queries and gives dQ, one over keys and
// gives dK and dV; both form P and dS anew. So no sum crosses blocks, and all are in fixed order.
#include "ingot/kernels/attention/hopper/walk.h"

namespace ingot::cuda::attention_hopper {

// What both need of the scores and of the forward pass. delta: of each query and head, the sum of dO * O.
struct ScoreParams {
  const float *lse, *delta;  // (H, Tq), rows lse_stride and delta_stride apart
  int64_t lse_stride, delta_stride;
  float scale;            // of a score
  float scale_log2;       // the same, to powers of two
  float cap_in, cap_out;  // as in the forward pass
  int width;
};

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
  bool add_dv;         // to what is there, which was rounded too
  float* query_sums;   // where dQ is added up (query_sums.cuh)
  uint32_t* counters;  // of what was added, one for each part
  void* dq;            // in order
  Strides dq_strides;
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

// Who forms dQ. apart: the kernel that walks over queries. Else the one that walks over keys adds it up too, in any
// order or in a fixed one, in which nobody waits long where the mask is causal.
enum class QueryGradientForm { apart, any_order, in_order };
struct BackwardShape {
  int width;
  bool capped, causal, deterministic, one_kernel;
};
constexpr QueryGradientForm query_gradient_form(const BackwardShape& s) {
  if (s.width > 128 || s.capped) return QueryGradientForm::apart;
  if (!s.deterministic) return QueryGradientForm::any_order;
  return s.one_kernel && s.causal ? QueryGradientForm::in_order : QueryGradientForm::apart;
}
template <class T> KeyGradientKernel joint_gradient_kernel(int width, bool in_order);
struct QuerySumParams {
  const int32_t *cu_q, *cu_k;
  int segments, heads, width;
  const float* sums;  // null: dQ has been written where a step of queries sees keys (causal), and is zero elsewhere
  int step;
  int64_t window;
  float scale;
  void* dq;
  Strides dq_strides;
};
// Launched with a block of 128 threads for each place of 64 queries and each head.
template <class T> void (*query_sums_kernel(int width))(const QuerySumParams);

}  // namespace ingot::cuda::attention_hopper
