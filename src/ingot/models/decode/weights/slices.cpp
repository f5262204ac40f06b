#include "ingot/models/decode/weights/slices.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "ingot/core/check.h"
#include "ingot/kernels/quant/weight_tiles.h"

namespace ingot::decode {
namespace {

int64_t units_of(int64_t all, int64_t unit) { return (all + unit - 1) / unit; }
// The part of `all` numbers that rank `rank` of `ranks` gets: whole units, divided as evenly as possible.
SliceRange part_of(int64_t all, int64_t unit, int64_t rank, int64_t ranks) {
  const int64_t units = units_of(all, unit), each = units / ranks, more = units % ranks;
  const auto at = [&](int64_t r) { return std::min(all, (r * each + std::min(r, more)) * unit); };
  return {at(rank), at(rank + 1)};
}

// The smallest number of key heads whose queries are whole weight tiles of the output's columns and whose rows are
// whole row tiles.
int64_t unit_of_heads(const DecoderSpec& c) {
  const int64_t queries = c.heads / c.kv_heads * c.head_dim;
  return std::lcm(kWeightTileCols / std::gcd(queries, kWeightTileCols),
                  kWeightTileRows / std::gcd(c.head_dim, kWeightTileRows));
}

}  // namespace

Slice whole(const DecoderSpec& c) {
  return {.kv_heads = {0, c.kv_heads}, .channels = {0, c.intermediate}, .ids = {0, c.vocab}};
}

std::vector<Slice> slices_of(const DecoderSpec& c, int ranks, Split split) {
  if (ranks == 1) return {whole(c)};
  const bool tensor = split == Split::tensor;
  const auto at_most = [&](const char* what, int64_t shared_by, int64_t units) {
    if (shared_by > units)
      fail(ErrorCode::unsupported, "found ", ranks, " GPUs, expected at most ", units + ranks - shared_by, ": ", what);
  };
  const int64_t sharers = tensor ? ranks : ranks - 1;
  at_most("the experts' channels come in units of 64", sharers, units_of(c.intermediate, kWeightTileCols));
  if (tensor) {
    if (c.q_width() % kWeightTileRows != 0 || c.kv_width() % kWeightTileRows != 0)
      fail(ErrorCode::unsupported, "several GPUs: found ", c.q_width(), " and ", c.kv_width(),
           " rows of queries and keys, expected multiples of ", kWeightTileRows);
    at_most("the key heads come in units whose queries fill 64 columns", ranks, units_of(c.kv_heads, unit_of_heads(c)));
    at_most("the vocabulary comes in units of 16 ids", ranks, units_of(c.vocab, kWeightTileRows));
  }
  std::vector<Slice> all;
  for (int64_t r = 0; r < ranks; ++r) {
    if (tensor)
      all.push_back({.kv_heads = part_of(c.kv_heads, unit_of_heads(c), r, ranks),
                     .channels = part_of(c.intermediate, kWeightTileCols, r, ranks),
                     .ids = part_of(c.vocab, kWeightTileRows, r, ranks)});
    else if (r == 0)
      all.push_back({.kv_heads = {0, c.kv_heads}, .channels = {}, .ids = {0, c.vocab}});
    else
      all.push_back(
          {.kv_heads = {}, .channels = part_of(c.intermediate, kWeightTileCols, r - 1, ranks - 1), .ids = {}});
  }
  return all;
}

int64_t Cut::row_count() const {
  int64_t n = 0;
  for (const SliceRange& r : rows) n += r.size();
  return n;
}

Cut qkv_cut(const DecoderSpec& c, const Slice& s) {
  const int64_t D = c.head_dim, group = c.heads / c.kv_heads, k = c.q_width(), v = k + c.kv_width();
  const auto [begin, end] = s.kv_heads;
  if (begin == 0 && end == c.kv_heads) return {.rows = {{0, c.qkv_width()}}, .cols = {0, c.hidden}};
  return {.rows = {{begin * group * D, end * group * D}, {k + begin * D, k + end * D}, {v + begin * D, v + end * D}},
          .cols = {0, c.hidden}};
}
Cut output_cut(const DecoderSpec& c, const Slice& s) {
  const int64_t queries = c.heads / c.kv_heads * c.head_dim;
  return {.rows = {{0, c.hidden}}, .cols = {s.kv_heads.begin * queries, s.kv_heads.end * queries}};
}
Cut gate_up_cut(const DecoderSpec& c, const Slice& s) {
  return {.rows = {{2 * s.channels.begin, 2 * s.channels.end}}, .cols = {0, c.hidden}};
}
Cut down_cut(const DecoderSpec& c, const Slice& s) { return {.rows = {{0, c.hidden}}, .cols = s.channels}; }
Cut head_cut(const DecoderSpec& c, const Slice& s) { return {.rows = {s.ids}, .cols = {0, c.hidden}}; }

int64_t cut_bytes(WeightFormat f, const Cut& cut) {
  return cut.cols.size() == 0 ? 0 : row_tile_count(cut.row_count()) * row_tile_bytes(f, cut.cols.size());
}

void cut_weight_tiles(const WeightMatrix& from, const Cut& cut, uint8_t* to) {
  if (cut.cols.size() == 0) return;
  const WeightFormat f = from.format;
  const int64_t weight_tile = weight_tile_bytes(f), full = row_tile_bytes(f, from.cols()),
                first = cut.cols.begin / kWeightTileCols,
                count = weight_tile_padded_cols(cut.cols.size()) / kWeightTileCols,
                row_tile = row_tile_bytes(f, cut.cols.size());
  const uint8_t* const data = from.data.ptr<uint8_t>();
  for (const SliceRange& rows : cut.rows) {
    if (rows.size() == 0) continue;
    INGOT_CHECK(rows.begin % kWeightTileRows == 0 && cut.cols.begin % kWeightTileCols == 0, "cut: found row ",
                rows.begin, ", column ", cut.cols.begin, ", expected whole weight tiles");
    for (int64_t b = rows.begin / kWeightTileRows; b < row_tile_count(rows.end); ++b, to += row_tile) {
      std::memcpy(to, data + b * full + first * weight_tile, size_t(count * weight_tile));
      // The row scales of fp8 stand at the end of a row tile.
      std::memcpy(to + count * weight_tile, data + (b + 1) * full - (row_tile - count * weight_tile),
                  size_t(row_tile - count * weight_tile));
    }
  }
}

std::vector<float> cut_vector(const Tensor& from, const Cut& cut) {
  const int64_t width = from.size(-1), n = from.numel() / width;
  std::vector<float> out;
  for (int64_t e = 0; e < n; ++e)
    for (const SliceRange& r : cut.rows)
      out.insert(out.end(), from.ptr<float>() + e * width + r.begin, from.ptr<float>() + e * width + r.end);
  return out;
}

}  // namespace ingot::decode
