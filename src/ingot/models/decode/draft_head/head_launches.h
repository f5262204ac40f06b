#pragma once
// The launches of an EAGLE-3 draft head on a GPU that the decoder's own phases do not have (device_head.h calls them in
// order; spec/eagle.py defines the head). C hidden size, n boundaries, Q and KV the widths of queries and keys.
#include "ingot/kernels/attention/decode_params.h"
#include "ingot/models/decode/model/state.h"

namespace ingot::decode {

constexpr uint32_t kHeadRows = 8;        // rows of a launch at most
constexpr uint32_t kMostBoundaries = 8;  // of a head

// Where a step of the target keeps its hidden states behind some of its layers, as the activation vectors of the head's
// first product: row t holds the states of all boundaries side by side.
struct KeptStates {
  uint32_t count = 0;
  uint32_t boundary[kMostBoundaries] = {};  // the number of layers before each boundary
  const float* weight = nullptr;            // (n C), of the norms before the product; null: no norm
  bool each = false;                        // a norm for each boundary; else one norm over all boundaries
  float eps = 0;
  WeightFormat format = WeightFormat::bf16;  // of that product's matrix
  char* vectors = nullptr;                   // (rows) activation vectors of n C numbers
  // (groups, n, 16): sums of squares of the rows of a group, where one norm is over all boundaries; as Normed::squares
  float* squares = nullptr;
  uint32_t group = kHeadRows;  // rows that one product takes
};
// Keeps rows x (T, x_stride) of the residual stream behind `layers` layers, where the head reads this boundary.
void keep_states(const KeptStates& states, uint32_t layers, const float* x, int64_t x_stride, uint32_t T, uint32_t C,
                 Stream stream);

// A slot's memory of a sequence. Slots lie one after another.
struct HeadSlots {
  bf16* features = nullptr;                 // (slots, capacity, C)
  bf16 *keys = nullptr, *values = nullptr;  // (slots, kv_heads, capacity, cache_dim)
  int64_t of_features = 0, of_keys = 0;     // distance of two slots in `features`, and in `keys` and `values`
};
// features[slot, position] = rows of x, rounded to bf16.
struct PlacedRows {
  const float* x;  // (T, x_stride)
  int64_t x_stride;
  HeadSlots slots;
  uint32_t T, C;
  uint32_t slot[kHeadRows], position[kHeadRows];
};
void place_features(const PlacedRows& rows, Stream stream);

// The inputs of the head's layer for T rows: the normalised embedding of each row's token beside the normalised
// features, as activation vectors of 2 C numbers.
struct HeadInputs {
  const bf16* embed;                      // (V, C)
  const float *embed_norm, *hidden_norm;  // (C)
  const bf16* features;                   // (T, C), of the first row on; null: the row continues from `x`
  int32_t token[kHeadRows];               // of each row, where `before` is null
  const State* before;                    // the guess before this row, an id of the head
  const int32_t* ids;                     // (D): the target's id of each id of the head; null: the same ids
  const float* output_norm;               // (C): `x` is normalised first; null: it is not
  float* x;                               // (C): receives the residual stream of the layer; T is 1. Null: none
  bool normed_residual;                   // the residual stream starts with the normalised features
  WeightFormat format;                    // of the matrix of that product
  char* vectors;
  uint32_t T, C, draft_vocab;
  float eps;
};
void head_inputs(const HeadInputs& inputs, Stream stream);

// Rotates and stores the keys, and stores the values, of rows *p.position on.
void store_head_keys(const decode_attention::Params& p, uint32_t cache_dim, Stream stream);
// The same for a single row, and its attention.
void attend_head(const decode_attention::Params& p, uint32_t cache_dim, Stream stream);

}  // namespace ingot::decode
