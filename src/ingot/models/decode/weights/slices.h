#pragma once
// The part of a model on each of several GPUs: ranges of whole weight tiles (kernels/quant/weight_tiles.h) of the same
// archive.
//     tensor             every rank has key heads with their queries, channels of every expert, and ids of the head
//     attention_experts  the first rank has all heads and ids, the remaining ranks share the experts' channels
// Every rank has embedding, norms and router. In a product with shared columns each rank that has columns computes a
// part of the sums, and the first of these ranks adds the bias.
#include <vector>

#include "ingot/models/decoder_weights.h"
#include "ingot/models/options.h"
#include "ingot/models/spec.h"

namespace ingot::decode {

using ingot::Split;

struct SliceRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const SliceRange&) const = default;
};
struct Slice {
  SliceRange kv_heads, channels, ids;
  bool operator==(const Slice&) const = default;
};
Slice whole(const DecoderSpec& config);
// Returns one slice for each rank; a single rank has the whole model. Throws Error{unsupported} where there are more
// ranks than heads or weight tiles to share, or heads that are not whole weight tiles.
std::vector<Slice> slices_of(const DecoderSpec& config, int ranks, Split split);

// A part of a matrix, or of each matrix of a bank: the ranges `rows`, one after the other, and the columns `cols`.
// Ranges begin and end at the boundary of a row tile or weight tile, or end with the matrix.
struct Cut {
  std::vector<SliceRange> rows;
  SliceRange cols;
  int64_t row_count() const;
};
Cut qkv_cut(const DecoderSpec& config, const Slice& slice);
Cut output_cut(const DecoderSpec& config, const Slice& slice);
Cut gate_up_cut(const DecoderSpec& config, const Slice& slice);
Cut down_cut(const DecoderSpec& config, const Slice& slice);
Cut head_cut(const DecoderSpec& config, const Slice& slice);

// The bytes of a cut, and the cut itself: copies the part from a matrix in weight tiles to `to`, as separate weight
// tiles. `to` has cut_bytes(...).
int64_t cut_bytes(WeightFormat format, const Cut& cut);
void cut_weight_tiles(const WeightMatrix& from, const Cut& cut, uint8_t* to);
// The elements of a vector that belong to the cut's rows; for the vectors (E, rows) of a bank, these elements of each
// expert.
std::vector<float> cut_vector(const Tensor& from, const Cut& cut);

}  // namespace ingot::decode
