#pragma once
// The operands of the kernels of a decode step: the addresses of weights and activations, and the state that the
// kernels advance from token to token without the host.
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

// A matrix in weight tiles, or a bank of such matrices.
struct Matrix {
  const uint8_t* data = nullptr;
  WeightFormat format = WeightFormat::bf16;
  uint32_t rows = 0, cols = 0, row_tiles = 0, weight_tiles = 0;  // of one matrix; the weight tiles of a row tile
  int64_t row_tile_bytes = 0, matrix_bytes = 0;
};
Matrix matrix_of(const WeightMatrix& weight_tiles);
// The int8 copy of a bf16 head, which finds the candidates for the largest logit (int8_prefilter.h).
struct PrefilterRow {
  float scale, bound;
};
struct Int8Prefilter {
  Matrix codes;                        // without data there is no copy
  const PrefilterRow* rows = nullptr;  // of all row tiles
};
// The width of a row of the cache: head_dim, padded to a width for which the kernels are compiled.
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

// Lies on the device across launches. A step appends tokens[0 .. T); the next step begins at `position`.
struct State {
  int32_t tokens[kMostTokens];
  int32_t position;
  uint32_t flaw;  // 1: a logit was NaN, 2: all were -inf
};

// The part of this GPU, if several GPUs share the work of a model (slices.h).
struct Ranks {
  megakernel::Exchange exchange;
  gpu::Watch watch;
  uint32_t heads = 1, channels = 1, ids = 1;  // bit r: rank r has heads, channels, ids
  uint32_t first_id = 0;                      // the first id of this rank
  uint32_t* arrived = nullptr;                // the counter of the exchanges of the phased path, zero between them
  uint64_t* key = nullptr;                    // the most likely id of this rank (kernels/sampling/best.cuh)
  float* added = nullptr;                     // (16, x_stride): this rank's part of the sum that is added to x

  INGOT_HD bool several() const { return exchange.ranks > 1; }
  INGOT_HD bool of(uint32_t some) const { return (some >> exchange.rank & 1) != 0; }
};

struct Buffers {
  State* state;
  sampling::RowNoise* noise;  // of the token that the megakernel samples; zeros at first
  float *x, *qkv;             // (16, x_stride), (16, qkv_width)
  char *mixed, *hidden;       // activation vectors (weight_tile_product.cuh): 16 of q_width, 16 k of intermediate
  float *part_max, *part_sum, *part_out;  // of attention
  char* normed;                           // 16 activation vectors of the hidden size
  float* choice_sums;                     // (16 k, x_stride)
  float *router_part, *router_squares;    // (splits, 16, E), (splits, 16)
  uint32_t* routed;                       // of Routed
  routing::Lists lists;                   // the lists of the first layer; the lists of the other layers follow
  int64_t expert_slots;                   // of a layer's lists
  float* logits;                          // (16, vocab)
  float* own_logits;                      // the logits of this GPU, if `logits` is the memory of another GPU
  uint64_t* best;                         // (blocks of the head)
  uint32_t* arrived;                      // (kv_heads + 2): attention's key heads, router, head
  // The words through which the blocks of the megakernel wait for each other and exchange results; zero at first.
  // Between launches the words keep their contents: the counter continues, an epoch tells old results from new ones,
  // and the next token resets the words of `sums`.
  uint32_t* grid_barrier;                // of grid barriers
  token_attention::Published attention;  // words with an epoch
  uint32_t* last_epoch;                  // the number of epochs used so far
  uint64_t* lower_bounds;                // by block: a lower bound of its largest logit; the upper half is the epoch
  uint64_t* sums;                        // TokenSums
  // The bytes from grid_barrier to `arrived`: zero at first, and to be zeroed after a launch whose waits gave up.
  int64_t handover_bytes;
  int64_t x_stride;
  const uint32_t* stop = nullptr;  // the `stop` of a gpu::Watch: after a wait has given up, nothing is appended
  // For the waits of a kernel's blocks for each other; without a watch blocks never wait for each other.
  gpu::Watch watch{};
  // With several ranks, `logits` points into the first rank's logits, at the first id of this rank.
  Ranks ranks;
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
  int64_t kv_heads = -1;  // the number of key heads of this GPU; -1: all
  const bf16* embed;      // (V, C)
  const float* norm;
  Matrix head;
  std::vector<Layer> layers;
  Int8Prefilter prefilter;
};

}  // namespace ingot::decode
