#pragma once
// What each of several GPUs holds of a model: ranges of whole weight tiles (kernels/quant/weight_tiles.h) of the same
// archive.
//     tensor              every rank has key heads with their queries, channels of every expert, and ids of the head
//     attention_experts   the first rank has all heads and ids, the others share the experts' channels
// Embedding, norms and router are everybody's. Of a product whose columns are shared each rank has a part of the sums,
// and its bias is the first's.
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
// One slice for each rank; of one rank it is the whole. Error{unsupported} for more ranks than there are pieces, or
// heads that are not whole weight tiles.
std::vector<Slice> slices_of(const DecoderSpec& config, int ranks, Split split);

// Rows `rows`, one range after the other, and columns `cols` of a matrix or of each of a bank's. Ranges begin with a
// row tile or weight tile and end with one, or with the matrix.
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

// One matrix in weight tiles and what is cut from it, as weight tiles of their own: `to` has cut_bytes(...).
int64_t cut_bytes(WeightFormat format, const Cut& cut);
void cut_weight_tiles(const WeightMatrix& from, const Cut& cut, uint8_t* to);
// The numbers of a vector that belong to the cut's rows; of a bank's (E, rows) those of each expert.
std::vector<float> cut_vector(const Tensor& from, const Cut& cut);

}  // namespace ingot::decode
