#pragma once
// The parameters of decode.cuh.
#include "ingot/core/dtype.h"
#include "ingot/core/hd.h"
#include "ingot/kernels/quant/quant.h"

namespace ingot::decode_attention {

constexpr int kWarps = 4, kThreads = 32 * kWarps;
constexpr uint32_t kPartKeys = 64;  // a part is a multiple of this
constexpr uint32_t kMostParts = 16;

struct Params {
  const int32_t* position;  // of the first new token
  const float* qkv;         // (T, (heads + 2 kv_heads) * dim)
  const float *cos, *sin;   // (positions, dim / 2)
  const float* sinks;       // (heads)
  bf16 *keys, *values;
  char* mixed;                                            // (T) columns of heads * dim
  float *part_max, *part_sum, *part_out;                  // (T * heads, parts), the same, (T * heads, parts, kDim)
  uint32_t* arrived;                                      // (kv_heads * tiles), zero between launches
  uint32_t T, heads, kv_heads, dim, rows, window, parts;  // window 0: all
  uint32_t tiles, group;                                  // tiles_of(...); heads / kv_heads
  float scale;
  WeightFormat columns;        // of the matrix multiplied by `mixed`
  bf16* mixed_rows = nullptr;  // (T, heads * dim), takes the results in place of `mixed`
};

INGOT_HD constexpr uint32_t tiles_of(uint32_t T, uint32_t group) { return (T * group + 15) / 16; }
// The number of parts of the keys: enough to fill the GPU where there are many keys, and no more than chunks of
// kPartKeys keys. `capacity` is the most keys of the sequence; with window 0 all keys are visible.
INGOT_HD constexpr uint32_t parts_of(uint32_t T, uint32_t window, uint32_t capacity) {
  const uint32_t keys = window > 0 && window - 1 + T < capacity ? window - 1 + T : capacity;
  const uint32_t parts = (keys + kPartKeys - 1) / kPartKeys;
  return parts < 1 ? 1 : parts > kMostParts ? kMostParts : parts;
}
INGOT_HD constexpr uint32_t units_of(const Params& p) { return p.parts * p.tiles * p.kv_heads; }

}  // namespace ingot::decode_attention

namespace ingot::tile {
struct EpochWords;
}
namespace ingot::token_attention {

// Where a persistent kernel publishes the results of a token's attention, in words with an epoch: mixed[i] holds
// numbers 4 i to 4 i + 3 of the mixed values, as two words of an activation vector (weight_tile_product.cuh).
struct Published {
  tile::EpochWords *parts, *mixed;  // (heads, parts, kDim / 4, 2), (heads * dim / 4)
  static constexpr int64_t parts_bytes(int64_t heads, int64_t parts, int64_t cache_dim) {
    return heads * parts * cache_dim * 8;
  }
  static constexpr int64_t mixed_bytes(int64_t heads, int64_t dim) { return heads * dim * 4; }
};

}  // namespace ingot::token_attention
