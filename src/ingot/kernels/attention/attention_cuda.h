#pragma once
// Code that the launchers of all variants of attention share. Included by .cu files.
#include "ingot/gpu/launch.h"
#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/attention/parts/tiles.h"
#include "ingot/kernels/attention/parts/walk.h"

namespace ingot::cuda {

// Checks an operand that is read or written 16 bytes at a time. (Operands that are read through a tensor map are
// checked when the map is made.)
void check_gpu_vectors(const char* op, const char* name, const Tensor& t);

inline attention_parts::Strides strides_of(const Tensor& t) { return {t.stride[0], t.stride[1]}; }
// The number of query heads whose keys and values, in a segment of mean length, stay in L2 together while the tiles of
// the segment are computed.
int heads_in_set(const Tensor& q, const Tensor& k, int64_t segments);

// The walk over tiles of `rows` queries.
template <class Op> attention_parts::Walk walk_of(const Op& a, int rows) {
  const int64_t segments = a.cu_q.size(0) - 1;
  return {.cu_q = a.cu_q.template ptr<int32_t>(),
          .cu_k = (a.cu_k ? a.cu_k : a.cu_q).template ptr<int32_t>(),
          .segments = int(segments),
          .heads = int(a.q.size(1)),
          .group = int(a.q.size(1) / a.k.size(1)),
          .heads_in_set = heads_in_set(a.q, a.k, segments),
          .key_rows = a.k.size(0),
          .window = a.window,
          .causal = a.causal,
          .places = detail::tile_places(a.q.size(0), segments, rows)};
}
// The walk over tiles of `keys` keys, for each key head.
attention_parts::Walk key_walk_of(const AttentionBackward& a, int keys);
attention_parts::ForwardParams forward_params(const Attention& a, int rows);
attention_parts::ScoreParams score_params(const AttentionBackward& a, const float* delta, int64_t stride);

}  // namespace ingot::cuda
