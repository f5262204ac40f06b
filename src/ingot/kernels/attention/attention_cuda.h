#pragma once
// Shared by attention's launchers. Included by .cu files.
#include "ingot/gpu/launch.h"
#include "ingot/gpu/tma_map.h"
#include "ingot/kernels/attention/attention.h"
#include "ingot/kernels/attention/hopper/tiles.h"
#include "ingot/kernels/attention/hopper/walk.h"

namespace ingot::cuda {

// Checks of a GPU's further requirements.
void check_hopper(const char* op, Device device);
void check_gpu_operands(const char* op, const Tensor& q, const Tensor& v);
// Checks an operand that is read or written 16 bytes at a time. (Operands behind tensor maps are checked when the map
// is made.)
void check_gpu_vectors(const char* op, const char* name, const Tensor& t);

// Boxes of `rows` tokens of a head by 64 columns.
CUtensorMap head_map(const char* name, const Tensor& t, int rows);
attention_hopper::Strides strides_of(const Tensor& t);
// At most one block per SM, whose blocks claim their items; or a block per item.
gpu::Launch walk_launch(const attention_hopper::Walk& w, int threads, int64_t smem, Device device);
// The slot of the counter for the items of a launch's blocks (claim_slots.h).
uint32_t claim_slot(Stream stream, Device device);
// The number of heads whose keys and values of a segment of medium length stay in L2 while its tiles are computed.
int heads_in_set(const Tensor& q, const Tensor& k, int64_t segments);

template <class Op> attention_hopper::Walk walk_of(const Op& a, int rows, Stream stream) {
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
          .places = detail::tile_places(a.q.size(0), segments, rows),
          .slot = claim_slot(stream, a.q.device)};
}

}  // namespace ingot::cuda
