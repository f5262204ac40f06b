#pragma once
// The arguments of the stages of a decode step (stages.cuh), and their values for a model and its buffers. The phased
// path and the megakernel both take them from here.
#include "ingot/core/hd.h"
#include "ingot/models/decode/model/state.h"

namespace ingot::decode {

struct Embedding {
  const bf16* table;
  const State* state;
  float* x;
  int64_t x_stride;
  uint32_t T, C;
};
// y = norm(x) W^T + b for T rows. `best` (of the head): receives the largest logit of the last row, in the megakernel
// the largest sum of logit and noise.
struct NormProduct {
  const float* x;
  int64_t x_stride;
  const float *weight, *bias;  // bias may be null
  Matrix w;
  float* y;
  int64_t y_stride;
  uint32_t T;
  float eps;
  uint64_t* best = nullptr;
  uint32_t* arrived = nullptr;
  State* state = nullptr;
  uint32_t vocab = 0, advance = 0;      // ids below `vocab` may be sampled; the position grows by `advance`
  uint32_t first_id = 0;                // of the rows of this GPU
  uint64_t* key = nullptr;              // over several GPUs: receives the largest logit; nothing is appended
  const uint32_t* stop = nullptr;       // of Buffers
  sampling::RowNoise* noise = nullptr;  // of the megakernel's token; a token that is appended counts its step
};
// x += vectors W^T + b. With `first_part` x counts as zero: this GPU's part of a sum over GPUs.
struct ResidualProduct {
  const char* vectors;
  const float* bias;
  Matrix w;
  float* x;
  int64_t x_stride;
  uint32_t T;
  bool first_part = false;
};
struct GateUp {
  const float* x;
  int64_t x_stride;
  const float *weight, *bias;  // (C), (E, 2 I)
  Matrix w;
  char* hidden;  // (T k) activation vectors of I numbers, in the order that `down` reads
  WeightFormat down;
  routing::Lists lists;
  uint32_t T, most;  // most: the largest possible number of expert slots
  float eps, limit, alpha;
};
// gate sigmoid(alpha gate + cubic gate^3) (up + up_offset), both clamped with a limit; 0: without.
struct Gate {
  float limit, alpha, up_offset, cubic;
};
inline Gate gate_of(const DecoderSpec& s) {
  return {float(s.gate.limit), float(s.gate.alpha), float(s.gate.up_offset), float(s.gate.cubic)};
}
// Whether the gate has GPT-OSS's form, for which special kernels exist.
inline bool is_clamped_gate(const DecoderSpec& s) { return s.gate.up_offset == 1 && s.gate.cubic == 0; }
// GateUp with any gate.
struct GeneralGateUp : GateUp {
  Gate gate;
};
struct Down {
  const char* hidden;
  const float* bias;  // (E, C), may be null
  Matrix w;
  float* x;
  int64_t x_stride;
  routing::Lists lists;
  uint32_t T, k, most;
  bool first_part = false;  // as in ResidualProduct
};
// The input of a small batch's product: rows of x times the norm's weight, as activation vectors in the order of the
// product's matrix. The stage before the product writes them.
struct Normed {
  char* vectors = nullptr;
  float* squares = nullptr;  // (parts, 16): sums of squares of x, in parts
  uint32_t parts = 0;        // 0: the vectors are not normalized
  WeightFormat format = WeightFormat::bf16;
};
struct SmallBatchProduct {
  Normed x;
  Matrix w;
  const float* bias;  // may be null
  float* y;           // (T, y_stride)
  int64_t y_stride;
  uint32_t T;
  float eps;
  bool adds;  // whether the product is added to y
};
// The weighted results of the experts of several tokens.
struct ChoiceSums {
  float* sums = nullptr;  // (T k, stride)
  int64_t stride = 0;
  uint32_t room = 0;  // activation vectors that a block holds in shared memory, at least T
};
// x += the results of each token's choices in their order, if `sums` is given; and the activation vectors of the next
// product, if `normed` has vectors.
struct ResidualNorm {
  float* x;
  int64_t x_stride;
  const float* sums;  // of ChoiceSums
  int64_t sums_stride;
  uint32_t T, k, C;
  bool first_part;      // as in Down
  const float* weight;  // of the norm
  Normed normed;        // without vectors: none are written
};
// The logits come in parts: all experts of a token, over a split of the channels.
struct Router {
  const float* x;
  int64_t x_stride;
  const float *weight, *bias;
  Matrix w;
  float *part, *squares;  // (splits, 16, E), (splits, 16)
  uint32_t* arrived;
  routing::Lists lists;
  uint32_t T, k, splits;
  float eps;
};

// The router of a small batch, computed by the blocks of gate and up, which wait for each other. Without a counter an
// earlier kernel has written the lists.
struct Routed {
  Router router{};
  uint32_t* counter = nullptr;  // of tile::grid_barrier()
  gpu::Watch watch{};
  uint32_t what = 0;
};
// The number of this wait in a WaitRecord, different from the number of every grid barrier.
INGOT_HD constexpr uint32_t wait_for_router(uint32_t layer) { return (1u << 20) + layer; }

// A step of a model; the same for all of its layers.
struct Plan {
  Buffers b;
  const bf16* table;
  const float* norm;
  Matrix head;
  uint32_t layers, hidden, heads, kv_heads, group, head_dim, experts, k;  // heads: of this GPU
  uint32_t vocab;                                                         // of the model
  uint32_t T, head_rows, sample_vocab, capacity;  // sample_vocab: ids that may be sampled; capacity: of the cache
  float eps, limit, alpha, scale;

  // The experts of a token in this layer, and the largest possible number of expert slots.
  INGOT_HD uint32_t choices(const Layer& l) const { return l.experts ? k : 1; }
  INGOT_HD uint32_t most(const Layer& l) const { return !l.experts ? 1 : T * k < experts ? T * k : experts; }
  INGOT_HD routing::Lists lists_of(const Layer& l, uint32_t index) const {
    return l.experts ? b.lists_of(index) : b.dense;
  }
  // Whether the results of output and down are added to the residual stream by a later kernel, because they are a part
  // of the sum over GPUs, or because a norm follows.
  INGOT_HD bool adds_later() const { return b.ranks.several() || b.branch != nullptr; }
  // The tensor to which output and down add their results.
  INGOT_HD float* added() const { return b.branch != nullptr ? b.branch : b.ranks.several() ? b.ranks.added : b.x; }
};
struct Step;  // decode.h
Plan plan_of(const Model& model, const Buffers& buffers, const Step& step);

constexpr uint32_t kSplitWeightTiles = 8;  // of the router, one for each warp
INGOT_HD constexpr uint32_t splits_of(uint32_t weight_tiles) {
  return (weight_tiles + kSplitWeightTiles - 1) / kSplitWeightTiles;
}

INGOT_HD inline Embedding embedding_of(const Plan& s) {
  return {.table = s.table, .state = s.b.state, .x = s.b.x, .x_stride = s.b.x_stride, .T = s.T, .C = s.hidden};
}
INGOT_HD inline NormProduct qkv_of(const Plan& s, const Layer& l) {
  return {.x = s.b.x,
          .x_stride = s.b.x_stride,
          .weight = l.attn_norm,
          .bias = l.b_qkv,
          .w = l.qkv,
          .y = s.b.qkv,
          .y_stride = int64_t(s.heads + 2 * s.kv_heads) * s.head_dim,
          .T = s.T,
          .eps = s.eps};
}
INGOT_HD inline decode_attention::Params attention_of(const Plan& s, const Layer& l) {
  return {.position = &s.b.state->position,
          .qkv = s.b.qkv,
          .cos = l.cos,
          .sin = l.sin,
          .sinks = l.sinks,
          .keys = l.keys,
          .values = l.values,
          .mixed = s.b.mixed,
          .part_max = s.b.part_max,
          .part_sum = s.b.part_sum,
          .part_out = s.b.part_out,
          .arrived = s.b.arrived + 2,
          .T = s.T,
          .heads = s.heads,
          .kv_heads = s.kv_heads,
          .dim = s.head_dim,
          .rows = l.cache_rows,
          .window = l.window,
          .parts = decode_attention::parts_of(s.T, l.window, s.capacity),
          .tiles = decode_attention::tiles_of(s.T, s.group),
          .group = s.group,
          .scale = s.scale,
          .columns = l.o.format};
}
INGOT_HD inline ResidualProduct output_of(const Plan& s, const Layer& l) {
  return {.vectors = s.b.mixed,
          .bias = l.b_o,
          .w = l.o,
          .x = s.added(),
          .x_stride = s.b.x_stride,
          .T = s.T,
          .first_part = s.adds_later()};
}
INGOT_HD inline Router router_of(const Plan& s, const Layer& l, uint32_t index) {
  return {.x = s.b.x,
          .x_stride = s.b.x_stride,
          .weight = l.mlp_norm,
          .bias = l.b_router,
          .w = l.router,
          .part = s.b.router_part,
          .squares = s.b.router_squares,
          .arrived = s.b.arrived,
          .lists = s.b.lists_of(index),
          .T = s.T,
          .k = s.k,
          .splits = splits_of(l.router.weight_tiles),
          .eps = s.eps};
}
INGOT_HD inline GateUp gate_up_of(const Plan& s, const Layer& l, uint32_t index) {
  return {.x = s.b.x,
          .x_stride = s.b.x_stride,
          .weight = l.mlp_norm,
          .bias = l.b_gate_up,
          .w = l.gate_up,
          .hidden = s.b.hidden,
          .down = l.down.format,
          .lists = s.lists_of(l, index),
          .T = s.T,
          .most = s.most(l),
          .eps = s.eps,
          .limit = s.limit,
          .alpha = s.alpha};
}
INGOT_HD inline Down down_of(const Plan& s, const Layer& l, uint32_t index) {
  return {.hidden = s.b.hidden,
          .bias = l.b_down,
          .w = l.down,
          .x = s.added(),
          .x_stride = s.b.x_stride,
          .lists = s.lists_of(l, index),
          .T = s.T,
          .k = s.choices(l),
          .most = s.most(l),
          .first_part = s.adds_later()};
}
INGOT_HD inline Normed normed_of(const Plan& s, WeightFormat format) {
  return {
      .vectors = s.b.normed, .squares = s.b.router_squares, .parts = splits_of((s.hidden + 63) / 64), .format = format};
}
INGOT_HD inline SmallBatchProduct small_batch_product(const NormProduct& p, const Normed& x) {
  return {.x = x, .w = p.w, .bias = p.bias, .y = p.y, .y_stride = p.y_stride, .T = p.T, .eps = p.eps, .adds = false};
}
INGOT_HD inline SmallBatchProduct small_batch_product(const ResidualProduct& p) {
  return {.x = {.vectors = const_cast<char*>(p.vectors)},
          .w = p.w,
          .bias = p.bias,
          .y = p.x,
          .y_stride = p.x_stride,
          .T = p.T,
          .eps = 0,
          .adds = !p.first_part};
}
INGOT_HD inline NormProduct head_of(const Plan& s) {
  return {.x = s.b.x + (s.T - s.head_rows) * s.b.x_stride,
          .x_stride = s.b.x_stride,
          .weight = s.norm,
          .bias = nullptr,
          .w = s.head,
          .y = s.b.logits,
          .y_stride = int64_t(s.vocab),
          .T = s.head_rows,
          .eps = s.eps,
          .best = s.b.best,
          .arrived = s.b.arrived + 1,
          .state = s.b.state,
          .vocab = s.sample_vocab,
          .advance = s.T,
          .first_id = s.b.ranks.first_id,
          .key = s.b.ranks.key,
          .stop = s.b.stop};
}

}  // namespace ingot::decode
