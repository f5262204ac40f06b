#pragma once
// What the kernels of a decode step see: where the weights are, where activations go, and what changes from token to
// token without the host.
#include "ingot/core/hd.h"
#include "ingot/gpu/watch.h"
#include "ingot/kernels/attention/decode_params.h"
#include "ingot/kernels/moe/route_lists.h"
#include "ingot/kernels/quant/quant.h"
#include "ingot/kernels/sampling/noise.h"
#include "ingot/megakernel/exchange.h"
#include "ingot/models/spec.h"

namespace ingot::decode {

constexpr uint32_t kMostTokens = 16;  // most tokens of a step

// A matrix, or a bank of them, in weight tiles.
struct Matrix {
  const uint8_t* data = nullptr;
  WeightFormat format = WeightFormat::bf16;
  uint32_t rows = 0, cols = 0, row_tiles = 0, weight_tiles = 0;  // of one; weight tiles of a row tile
  int64_t row_tile_bytes = 0, matrix_bytes = 0;
};
Matrix matrix_of(const WeightMatrix& weight_tiles);
// A head in 8 bits beside the bf16 one, to find the rows that may be the largest (int8_prefilter.h).
struct PrefilterRow {
  float scale, bound;
};
struct Int8Prefilter {
  Matrix codes;                        // no data: there is none
  const PrefilterRow* rows = nullptr;  // of all row tiles
};
// A cache's row: head_dim, filled up to what the kernels are made for.
constexpr uint32_t kWideDim = 256;
INGOT_HD constexpr uint32_t padded_dim(uint32_t head_dim) {
  return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : kWideDim;
}

struct Layer {
  // b_qkv, b_o and b_down may be null. A model without sinks has sinks of -infinity; without biases of the MLP, the
  // biases of router, gate and up are zeros.
  const float *attn_norm, *mlp_norm, *b_qkv, *b_o, *b_router, *sinks, *b_gate_up, *b_down;
  Matrix qkv, o, router, gate_up, down;
  bf16 *keys, *values;                         // (kv_heads, cache_rows, cache_dim)
  uint32_t cache_rows, window;                 // window 0: all
  const float *cos = nullptr, *sin = nullptr;  // (positions, head_dim / 2)
  bool experts = true;                         // else a dense MLP, which the kernels compute as a single expert
  // With NormSpec::post, and with DecoderSpec::qk_norm.
  const float *attn_post_norm = nullptr, *mlp_post_norm = nullptr, *q_norm = nullptr, *k_norm = nullptr;
};

// On the device, from launch to launch. A step appends tokens[0 .. T); the step after it begins at `position`.
struct State {
  int32_t tokens[kMostTokens];
  int32_t position;
  uint32_t flaw;  // 1: a logit was NaN, 2: all were -inf
};

// This GPU's part where several share a model's work (slices.h).
struct Ranks {
  megakernel::Exchange exchange;
  gpu::Watch watch;
  uint32_t heads = 1, channels = 1, ids = 1;  // which ranks have some, a bit each
  uint32_t first_id = 0;                      // of this rank's
  uint32_t* arrived = nullptr;                // of the exchanges of the phased path, zero between them
  uint64_t* key = nullptr;                    // this rank's likeliest id (kernels/sampling/best.cuh)
  float* added = nullptr;                     // (16, x_stride): this rank's part of what is added to x

  INGOT_HD bool several() const { return exchange.ranks > 1; }
  INGOT_HD bool of(uint32_t some) const { return (some >> exchange.rank & 1) != 0; }
};

struct Buffers {
  State* state;
  sampling::RowNoise* noise;              // of the token that the megakernel samples; zeros at first
  float *x, *qkv;                         // (16, x_stride), (16, qkv_width)
  char *mixed, *hidden;                   // columns (weight_tile_product.cuh) of q_width, (16); of intermediate, (16 k)
  float *part_max, *part_sum, *part_out;  // of attention
  char* normed;                           // columns of the hidden size, (16)
  float* choice_sums;                     // (16 k, x_stride)
  float *router_part, *router_squares;    // (splits, 16, E), (splits, 16)
  uint32_t* routed;                       // of Routed
  routing::Lists lists;                   // of the first layer; the others' follow
  int64_t expert_slots;                   // of a layer's lists
  float* logits;                          // (16, vocab)
  float* own_logits;                      // the same, but this GPU's where those are another's
  uint64_t* best;                         // (blocks of the head)
  uint32_t* arrived;                      // (kv_heads + 2): attention's key heads, router, head
  // The megakernel's. The first and the last are zero between launches, or nearly.
  uint32_t* grid_barrier;                // of grid barriers
  token_attention::Published attention;  // stamped
  uint32_t* last_epoch;                  // how many have been used
  uint64_t* lower_bounds;                // of each block, what its largest logit is at least, stamped (high)
  uint64_t* sums;                        // TokenSums
  int64_t handover_bytes;  // `grid barrier` to `arrived`, all of it: zero at first, to be zeroed after a launch that
                           // gave up
  int64_t x_stride;
  const uint32_t* stop = nullptr;  // of a gpu::Watch: where it says that a wait gave up nothing is appended
  gpu::Watch watch{};              // of waits of a kernel's blocks for each other; without it there are none
  Ranks ranks;                     // with several, `logits` are the first rank's, from this one's first id on
  // (16, x_stride), with NormSpec::post: the output of attention or MLP before its norm. Null: outputs are added to x.
  float* branch = nullptr;
  routing::Lists dense{};  // of every dense MLP: one slot, with all tokens of the step

  INGOT_HD routing::Lists lists_of(size_t layer) const {
    const int64_t n = int64_t(layer) * expert_slots;
    return {lists.count + layer, lists.expert + n, lists.weight + n * routing::kTokens,
            lists.row + n * routing::kTokens};
  }
};

struct Model {
  DecoderSpec config;     // of the whole model
  int64_t kv_heads = -1;  // that this GPU has; -1: all
  const bf16* embed;      // (V, C)
  const float* norm;
  Matrix head;
  std::vector<Layer> layers;
  Int8Prefilter prefilter;
};

}  // namespace ingot::decode
