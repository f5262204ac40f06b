#include "ingot/kernels/quant/weight_tiles.h"

#include <cstring>

#include "ingot/core/cpu/thread_pool.h"
#include "ingot/kernels/quant/device_order.h"

namespace ingot {
namespace {

constexpr int64_t kMxScales = kWeightTileRows * kWeightTileCols / kMxBlock;  // of a weight tile
constexpr uint8_t kUnitScale = 127;

void require_weight_tiles(WeightFormat f) {
  INGOT_CHECK(has_weight_tiles(f), "weight tiles: found ", f, " numbers, expected bf16, fp8 or mxfp4");
}
int64_t number_bits(WeightFormat f) { return f == WeightFormat::bf16 ? 16 : f == WeightFormat::fp8 ? 8 : 4; }

// --- the bytes of a weight tile and their rows, as source or target: 16 rows of `row_bytes` each. Bf16 and fp8 move
// whole words; the columns of a step are 32 bytes of a row in both.
template <class Move> void each_word(WeightFormat f, Move&& move) {
  for (int64_t s = 0; s < weight_tile_bytes(f) / 512; ++s)
    for (int64_t lane = 0; lane < 32; ++lane)
      for (int64_t i = 0; i < 4; ++i)
        move(s * 512 + lane * 16 + i * 4, lane / 4 + 8 * (i & 1), s * 32 + lane % 4 * 4 + 16 * (i >> 1));
}

void pack_codes(const uint8_t* rows, int64_t row_bytes, uint8_t* weight_tile) {
  for (int64_t lane = 0; lane < 32; ++lane)
    for (int64_t s = 0; s < 4; ++s) {
      uint32_t word = 0;
      for (int64_t i = 0; i < 4; ++i) {
        const uint32_t pair = rows[(lane / 4 + 8 * (i & 1)) * row_bytes + 8 * s + lane % 4 + 4 * (i >> 1)];
        word |= ((pair & 15) | (pair >> 4) << 16) << (4 * i);
      }
      std::memcpy(weight_tile + lane * 16 + s * 4, &word, 4);
    }
}
void unpack_codes(const uint8_t* weight_tile, uint8_t* rows, int64_t row_bytes) {
  for (int64_t lane = 0; lane < 32; ++lane)
    for (int64_t s = 0; s < 4; ++s) {
      uint32_t word;
      std::memcpy(&word, weight_tile + lane * 16 + s * 4, 4);
      for (int64_t i = 0; i < 4; ++i)
        rows[(lane / 4 + 8 * (i & 1)) * row_bytes + 8 * s + lane % 4 + 4 * (i >> 1)] =
            uint8_t((word >> (4 * i) & 15) | (word >> (4 * i + 16) & 15) << 4);
    }
}

// A row tile's rows side by side, filled up to whole weight tiles.
struct BandRows {
  int64_t row_bytes, used_bytes, rows;
  uint8_t* numbers;  // 16 rows
  BandRows(const WeightMatrix& w, int64_t row_tile)
      : row_bytes(weight_tile_padded_cols(w.cols()) * number_bits(w.format) / 8),
        used_bytes(w.cols() * number_bits(w.format) / 8),
        rows(std::min(kWeightTileRows, w.rows() - row_tile * kWeightTileRows)),
        numbers(static_cast<uint8_t*>(thread_scratch(0, kWeightTileRows * row_bytes))) {}
};

void pack_band(const WeightMatrix& from, int64_t row_tile, uint8_t* to) {
  const BandRows b(from, row_tile);
  const int64_t first = row_tile * kWeightTileRows,
                weight_tiles = weight_tile_padded_cols(from.cols()) / kWeightTileCols;
  std::memset(b.numbers, 0, size_t(kWeightTileRows * b.row_bytes));
  for (int64_t r = 0; r < b.rows; ++r)
    std::memcpy(b.numbers + r * b.row_bytes, static_cast<const uint8_t*>(from.data.data) + (first + r) * b.used_bytes,
                size_t(b.used_bytes));
  const int64_t bytes = weight_tile_bytes(from.format);
  const int64_t width = kWeightTileCols * number_bits(from.format) / 8;
  for (int64_t q = 0; q < weight_tiles; ++q) {
    uint8_t* weight_tile = to + q * bytes;
    const uint8_t* rows = b.numbers + q * width;
    if (from.format != WeightFormat::mxfp4) {
      each_word(from.format, [&](int64_t at, int64_t row, int64_t byte) {
        std::memcpy(weight_tile + at, rows + row * b.row_bytes + byte, 4);
      });
      continue;
    }
    pack_codes(rows, b.row_bytes, weight_tile);
    const int64_t blocks = from.cols() / kMxBlock;
    const uint8_t* scales = from.scales.ptr<uint8_t>() + first * blocks;
    for (int64_t r = 0; r < kWeightTileRows; ++r)
      for (int64_t i = 0; i < 2; ++i)
        weight_tile[512 + 4 * (r % 8) + 2 * i + r / 8] =
            r < b.rows && 2 * q + i < blocks ? scales[r * blocks + 2 * q + i] : kUnitScale;
  }
  if (from.format != WeightFormat::fp8) return;
  float scales[kWeightTileRows] = {};
  std::memcpy(scales, from.scales.ptr<float>() + first, size_t(b.rows) * sizeof(float));
  std::memcpy(to + weight_tiles * bytes, scales, sizeof scales);
}

void unpack_band(const uint8_t* from, int64_t row_tile, const WeightMatrix& to) {
  const BandRows b(to, row_tile);
  const int64_t first = row_tile * kWeightTileRows, weight_tiles = weight_tile_padded_cols(to.cols()) / kWeightTileCols;
  const int64_t bytes = weight_tile_bytes(to.format), width = kWeightTileCols * number_bits(to.format) / 8;
  for (int64_t q = 0; q < weight_tiles; ++q) {
    const uint8_t* weight_tile = from + q * bytes;
    uint8_t* rows = b.numbers + q * width;
    if (to.format != WeightFormat::mxfp4) {
      each_word(to.format, [&](int64_t at, int64_t row, int64_t byte) {
        std::memcpy(rows + row * b.row_bytes + byte, weight_tile + at, 4);
      });
      continue;
    }
    unpack_codes(weight_tile, rows, b.row_bytes);
    const int64_t blocks = to.cols() / kMxBlock;
    uint8_t* scales = to.scales.ptr<uint8_t>() + first * blocks;
    for (int64_t r = 0; r < b.rows; ++r)
      for (int64_t i = 0; i < 2 && 2 * q + i < blocks; ++i)
        scales[r * blocks + 2 * q + i] = weight_tile[512 + 4 * (r % 8) + 2 * i + r / 8];
  }
  for (int64_t r = 0; r < b.rows; ++r)
    std::memcpy(static_cast<uint8_t*>(to.data.data) + (first + r) * b.used_bytes, b.numbers + r * b.row_bytes,
                size_t(b.used_bytes));
  if (to.format == WeightFormat::fp8)
    std::memcpy(to.scales.ptr<float>() + first, from + weight_tiles * bytes, size_t(b.rows) * sizeof(float));
}

template <class Change> void change_words(const WeightMatrix& w, Change&& change) {
  INGOT_CHECK(w.in_weight_tiles() && w.data.device.kind == Device::cpu, "device order: found ", w.format,
              " numbers, expected weight tiles on a cpu");
  if (w.format != WeightFormat::mxfp4) return;
  const int64_t bytes = weight_tile_bytes(w.format);
  parallel_for(w.data.numel() / bytes, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t q = begin; q < end; ++q)
      for (int64_t i = 0; i < bytes - kMxScales; i += 4) {
        uint8_t* const at = w.data.ptr<uint8_t>() + q * bytes + i;
        uint32_t word;
        std::memcpy(&word, at, 4);
        word = change(word);
        std::memcpy(at, &word, 4);
      }
  });
}

void check_pair(const char* op, const WeightMatrix& rows, const WeightMatrix& weight_tiles) {
  check(rows, op, "rows");
  check(weight_tiles, op, "weight_tiles");
  INGOT_CHECK(!rows.in_weight_tiles() && weight_tiles.in_weight_tiles() && !rows.is_bank() && !weight_tiles.is_bank() &&
                  rows.format == weight_tiles.format && rows.rows() == weight_tiles.rows() &&
                  rows.cols() == weight_tiles.cols() && rows.data.device.kind == Device::cpu &&
                  weight_tiles.data.device.kind == Device::cpu,
              op, ": found ", rows.format, " (", rows.rows(), ", ", rows.cols(), ") and ", weight_tiles.format, " (",
              weight_tiles.rows(), ", ", weight_tiles.cols(),
              "), expected one matrix on a cpu in rows and in weight tiles");
}

}  // namespace

bool has_weight_tiles(WeightFormat f) {
  return f == WeightFormat::bf16 || f == WeightFormat::fp8 || f == WeightFormat::mxfp4;
}
int64_t weight_tile_bytes(WeightFormat f) {
  require_weight_tiles(f);
  return kWeightTileRows * kWeightTileCols * number_bits(f) / 8 + (f == WeightFormat::mxfp4 ? kMxScales : 0);
}
int64_t row_tile_count(int64_t rows) { return (rows + kWeightTileRows - 1) / kWeightTileRows; }
int64_t weight_tile_padded_cols(int64_t cols) {
  return (cols + kWeightTileCols - 1) / kWeightTileCols * kWeightTileCols;
}
int64_t row_tile_bytes(WeightFormat f, int64_t cols) {
  return weight_tile_padded_cols(cols) / kWeightTileCols * weight_tile_bytes(f) +
         (f == WeightFormat::fp8 ? kWeightTileRows * int64_t(sizeof(float)) : 0);
}

WeightMatrix weight_tiles_at(void* memory, WeightFormat f, int64_t experts, int64_t rows, int64_t cols) {
  WeightMatrix w;
  w.format = f;
  w.layout = WeightLayout::weight_tiles;
  w.n = rows, w.k = cols;
  const int64_t row_tiles = row_tile_count(rows), bytes = row_tile_bytes(f, cols);
  w.data = Tensor(memory, DType::u8, experts > 0 ? Shape{experts, row_tiles, bytes} : Shape{row_tiles, bytes});
  return w;
}

void pack_weight_tiles(const WeightMatrix& from, const WeightMatrix& to) {
  check_pair("pack_weight_tiles", from, to);
  parallel_for(to.data.size(0), 4, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) pack_band(from, b, to.data.ptr<uint8_t>() + b * to.data.size(1));
  });
}
void unpack_weight_tiles(const WeightMatrix& from, const WeightMatrix& to) {
  check_pair("unpack_weight_tiles", to, from);
  parallel_for(from.data.size(0), 4, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) unpack_band(from.data.ptr<uint8_t>() + b * from.data.size(1), b, to);
  });
}

void to_device_order(const WeightMatrix& w) {
  change_words(w, [](uint32_t w) { return weight_tiles::to_device_order(w); });
}
void from_device_order(const WeightMatrix& w) {
  change_words(w, [](uint32_t w) { return weight_tiles::from_device_order(w); });
}

namespace detail {

WeightTilePlace weight_tile_place(WeightFormat f, int64_t row, int64_t col) {
  const int64_t weight_tile = col / kWeightTileCols * weight_tile_bytes(f), g = row % 8, r = row / 8,
                c = col % kWeightTileCols;
  if (f == WeightFormat::bf16) {
    const int64_t s = c / 16, t = c % 8 / 2, i = r + 2 * (c % 16 / 8);
    return {weight_tile + s * 512 + (4 * g + t) * 16 + 4 * i + 2 * (c % 2), false};
  }
  if (f == WeightFormat::fp8) {
    const int64_t s = c / 32, t = c % 16 / 4, i = r + 2 * (c % 32 / 16);
    return {weight_tile + s * 512 + (4 * g + t) * 16 + 4 * i + c % 4, false};
  }
  const int64_t s = c / 16, t = c % 8 / 2, code = r + 2 * (c % 16 / 8) + 4 * (c % 2);
  return {weight_tile + (4 * g + t) * 16 + 4 * s + code / 2, code % 2 != 0};
}
int64_t weight_tile_scale_place(WeightFormat f, int64_t row, int64_t col, int64_t cols) {
  if (f == WeightFormat::fp8) return weight_tile_padded_cols(cols) / kWeightTileCols * weight_tile_bytes(f) + 4 * row;
  return col / kWeightTileCols * weight_tile_bytes(f) + 512 + 4 * (row % 8) + 2 * (col % kWeightTileCols / kMxBlock) +
         row / 8;
}
int weight_tile_column(WeightFormat f, int position) {
  if (f == WeightFormat::bf16) {  // low halves of the row's 32 words, then high halves
    const int e = position % 32;
    return e / 8 * 16 + e % 8 / 2 * 2 + e % 2 * 8 + position / 32;
  }
  if (f == WeightFormat::fp8) {  // byte 0 of its 16 words, then byte 1, ...
    const int e = position % 16;
    return e / 8 * 32 + e % 8 / 2 * 4 + e % 2 * 16 + position / 16;
  }
  const int e = position % 16, plane = position / 16;  // a code of its 16 words, then the next
  return e % 4 * 16 + e / 4 * 2 + plane / 2 * 8 + plane % 2;
}

}  // namespace detail

}  // namespace ingot
