#include "ingot/kernels/quant/weight_tiles.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>

#include "ingot/core/cpu/cpu.h"
#include "ingot/kernels/quant/device_order.h"
#include "ingot/testing/temporary_directory.h"
#include "ingot/testing/testing.h"

namespace ingot {
namespace {

using testing::Buffer;
using testing::error_of;
using testing::fill_normal;
using testing::values;

constexpr WeightFormat kFormats[] = {WeightFormat::bf16, WeightFormat::fp8, WeightFormat::mxfp4};

// Random numbers in rows, and the same matrix in weight tiles. Both memories start as `poison`.
struct Pair {
  std::vector<uint8_t> bytes, scale_bytes, packed;
  WeightMatrix rows, weight_tiles;
  Pair(WeightFormat f, int64_t n, int64_t k, uint8_t poison = 0xcc)
      : bytes(size_t(n * k *
                     (f == WeightFormat::bf16  ? 4
                      : f == WeightFormat::fp8 ? 2
                                               : 1) /
                     2),
              poison),
        scale_bytes(size_t(n * (k / 32 + 4)), poison),
        packed(size_t(row_tile_count(n) * row_tile_bytes(f, k)), poison) {
    if (f == WeightFormat::bf16)
      rows = WeightMatrix(Tensor(bytes.data(), DType::bf16, {n, k}));
    else if (f == WeightFormat::fp8)
      rows = {f, Tensor(bytes.data(), DType::u8, {n, k}), Tensor(scale_bytes.data(), DType::f32, {n})};
    else
      rows = {f, Tensor(bytes.data(), {n, k / 32, 16}), Tensor(scale_bytes.data(), {n, k / 32})};
    Buffer numbers(DType::f32, {n, k});
    fill_normal(numbers, uint64_t(n * 1000 + k), 2 / std::sqrt(double(k)));
    quantise(numbers, rows, {});
    weight_tiles = weight_tiles_at(packed.data(), f, 0, n, k);
    pack_weight_tiles(rows, weight_tiles);
  }
};
struct Sizes {
  int64_t rows, cols;
};
constexpr Sizes kSizes[] = {{16, 64}, {1, 32}, {5, 96}, {33, 64}, {47, 160}, {100, 320}};

TEST(weight_tiles, numbers_keep_their_values_and_convert_back_byte_for_byte) {
  for (WeightFormat f : kFormats)
    for (const Sizes& s : kSizes) {
      const Pair a(f, s.rows, s.cols), b(f, s.rows, s.cols, 0x33);
      EXPECT_EQ(a.packed, b.packed) << f << ": a byte was left as it was";
      for (DType dtype : {DType::f32, DType::f64}) {
        Buffer from(dtype, {s.rows, s.cols}), to(dtype, {s.rows, s.cols}, s.cols + 3);
        dequantise(a.rows, from, {});
        dequantise(a.weight_tiles, to, {});
        EXPECT_EQ(values(from), values(to)) << f << " " << s.rows << " " << s.cols;
        EXPECT_TRUE(to.guards_intact());
      }
      Pair again(f, s.rows, s.cols);
      const auto bytes = again.bytes, scale_bytes = again.scale_bytes;
      std::fill(again.bytes.begin(), again.bytes.end(), uint8_t(0));
      unpack_weight_tiles(again.weight_tiles, again.rows);
      EXPECT_EQ(again.bytes, bytes);
      EXPECT_EQ(again.scale_bytes, scale_bytes);
    }
}

// The operand tables of the PTX manual: the row and column (within a step) of element e of a lane's fragment A.
struct Element {
  int64_t row, col;
};
Element of_m16n8k16(int64_t lane, int64_t e) {
  const int64_t group = lane >> 2, in_group = lane % 4;
  return {(e < 2 || (e >= 4 && e < 6)) ? group : group + 8, in_group * 2 + (e & 1) + (e >= 4 ? 8 : 0)};
}
Element of_m16n8k32(int64_t lane, int64_t e) {
  const int64_t group = lane >> 2, in_group = lane % 4;
  return {(e < 4 || (e >= 8 && e < 12)) ? group : group + 8, in_group * 4 + (e & 3) + (e >= 8 ? 16 : 0)};
}

TEST(weight_tiles, a_lane_finds_its_fragments_in_the_order_of_its_registers) {
  for (int64_t lane = 0; lane < 32; ++lane)
    for (int64_t s = 0; s < 4; ++s)
      for (int64_t e = 0; e < 8; ++e) {
        const Element at = of_m16n8k16(lane, e);
        EXPECT_EQ(detail::weight_tile_place(WeightFormat::bf16, at.row, 16 * s + at.col).byte,
                  s * 512 + lane * 16 + e * 2);
        // The same element as a code: register e / 2 of step s, its low or its high half.
        const auto code = detail::weight_tile_place(WeightFormat::mxfp4, at.row, 16 * s + at.col);
        const int64_t nibble = e / 2 + 4 * (e % 2);
        EXPECT_EQ(code.byte * 2 + code.high, (lane * 16 + s * 4) * 2 + nibble);
      }
  for (int64_t lane = 0; lane < 32; ++lane)
    for (int64_t s = 0; s < 2; ++s)
      for (int64_t e = 0; e < 16; ++e) {
        const Element at = of_m16n8k32(lane, e);
        EXPECT_EQ(detail::weight_tile_place(WeightFormat::fp8, at.row, 32 * s + at.col).byte, s * 512 + lane * 16 + e);
      }
}

TEST(weight_tiles, every_number_and_every_scale_has_a_place_of_its_own) {
  for (WeightFormat f : kFormats) {
    std::set<int64_t> taken;
    const int64_t width = f == WeightFormat::bf16 ? 4 : f == WeightFormat::fp8 ? 2 : 1;  // in half bytes
    for (int64_t r = 0; r < 16; ++r)
      for (int64_t c = 0; c < 128; ++c) {
        const auto p = detail::weight_tile_place(f, r, c);
        for (int64_t i = 0; i < width; ++i) EXPECT_TRUE(taken.insert(p.byte * 2 + p.high + i).second);
        const int64_t scale = f == WeightFormat::mxfp4 && c % 32 == 0 ? 2 : f == WeightFormat::fp8 && c == 0 ? 8 : 0;
        for (int64_t i = 0; i < scale; ++i)
          EXPECT_TRUE(taken.insert(detail::weight_tile_scale_place(f, r, c, 128) * 2 + i).second);
      }
    EXPECT_EQ(*taken.begin(), 0);
    EXPECT_EQ(int64_t(taken.size()), 2 * row_tile_bytes(f, 128)) << f;
    EXPECT_EQ(*taken.rbegin(), 2 * row_tile_bytes(f, 128) - 1) << f;
    std::set<int> columns;
    for (int i = 0; i < 64; ++i) columns.insert(detail::weight_tile_column(f, i));
    EXPECT_EQ(columns.size(), 64u);
  }
}

TEST(weight_tiles, products_follow_the_fp64_oracle_at_every_cpu_level_and_batch) {
  const CpuLevel before = cpu_level();
  for (CpuLevel level : {CpuLevel::baseline, cpu_level_available()})
    for (WeightFormat f : kFormats)
      for (const Sizes& s : kSizes) {
        const Pair p(f, s.rows, s.cols);
        for (int64_t tokens : {0, 1, 2, 3, 4, 5, 7, 8, 9, 40})
          for (bool bias : {false, true}) {
            set_cpu_level(level);
            Buffer x(DType::f32, {tokens, s.cols}, s.cols + 3), b(DType::f32, {s.rows});
            Buffer y(DType::f32, {tokens, s.rows}, s.rows + 1);
            fill_normal(x, 2);
            fill_normal(b, 3);
            stored_linear({.x = x, .w = p.weight_tiles, .b = bias ? b.tensor() : Tensor(), .y = y}, {});
            Buffer x64(DType::f64, {tokens, s.cols}), b64(DType::f64, {s.rows}), y64(DType::f64, {tokens, s.rows});
            testing::assign(x64, values(x));
            testing::assign(b64, values(b));
            stored_linear({.x = x64, .w = p.rows, .b = bias ? b64.tensor() : Tensor(), .y = y64}, {});
            // As for rows: sqrt(K) roundings of partial sums around 2 in random directions, and a rounding of the
            // result.
            const double eps = testing::roundoff(DType::f32);
            const auto result = testing::compare(y, values(y64), 6 * 4 * std::sqrt(double(s.cols)) * eps, 2 * eps);
            EXPECT_TRUE(result.ok) << f << " " << tokens << " " << s.rows << " " << s.cols << ": " << result.message;
            EXPECT_TRUE(y.guards_intact());
          }
      }
  set_cpu_level(before);
}

TEST(weight_tiles, each_of_up_to_eight_rows_is_to_the_last_bit_the_row_alone_in_every_format_and_at_every_cpu_level) {
  const CpuLevel before = cpu_level();
  for (const CpuLevel level : {CpuLevel::baseline, cpu_level_available()}) {
    set_cpu_level(level);
    for (const WeightFormat f : kFormats)
      for (const Sizes& s : kSizes) {
        const Pair w(f, s.rows, s.cols);
        std::vector<float> wide(size_t(s.rows * s.cols));
        dequantise(w.rows, Tensor(wide.data(), {s.rows, s.cols}), {});
        Buffer x(DType::f32, {8, s.cols}), b(DType::f32, {s.rows});
        fill_normal(x, 3), fill_normal(b, 4);
        for (const WeightMatrix& m : {w.rows, w.weight_tiles, WeightMatrix(Tensor(wide.data(), {s.rows, s.cols}))}) {
          Buffer alone(DType::f32, {8, s.rows});
          const Tensor all = x, each = alone;
          for (int64_t t = 0; t < 8; ++t)
            stored_linear({.x = all.slice(0, t, t + 1), .w = m, .b = b, .y = each.slice(0, t, t + 1)}, {});
          for (int64_t rows = 2; rows <= 8; ++rows) {
            Buffer together(DType::f32, {rows, s.rows});
            stored_linear({.x = all.slice(0, 0, rows), .w = m, .b = b, .y = together}, {});
            EXPECT_EQ(values(together), values(each.slice(0, 0, rows))) << f << " " << rows << " " << s.rows;
          }
        }
      }
  }
  set_cpu_level(before);
}

TEST(weight_tiles, a_word_in_device_order_gives_its_pairs_as_bf16_and_its_codes_back) {
  uint32_t random = 1;
  for (uint32_t n = 0; n < 200000; ++n) {
    // Each code in each place beside zeros and ones, then random words.
    random = random * 1664525 + 1013904223;
    const uint32_t one = n / 8 % 16 << n % 8 * 4, codes = n < 128 ? one : n < 256 ? ~one : random ^ random >> 15;
    const uint32_t word = weight_tiles::to_device_order(codes);
    ASSERT_EQ(weight_tiles::from_device_order(word), codes);
    ASSERT_EQ(weight_tiles::to_device_order(weight_tiles::from_device_order(codes)), codes);
    for (int i = 0; i < 4; ++i)
      for (int half = 0; half < 2; ++half) {
        constexpr float kValues[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
        const uint32_t c = codes >> (4 * i + 16 * half) & 15;
        bf16 two;
        two.bits = uint16_t(weight_tiles::two_of_mxfp4(word, i) >> (16 * half));
        ASSERT_EQ(float(two), (c < 8 ? 1 : -1) * kValues[c % 8] * 0x1p-126f) << codes << " " << i;
        ASSERT_EQ(two.bits >> 15, c / 8) << "zero's sign";
      }
  }
}

TEST(weight_tiles, device_order_changes_only_codes_and_is_reversible) {
  for (WeightFormat f : kFormats) {
    std::vector<uint8_t> memory(size_t(3 * 2 * row_tile_bytes(f, 160)));
    for (size_t i = 0; i < memory.size(); ++i) memory[i] = uint8_t(i * 167 + i / 256);
    const std::vector<uint8_t> before = memory;
    const WeightMatrix bank = weight_tiles_at(memory.data(), f, 3, 20, 160);
    to_device_order(bank);
    for (size_t i = 0; i < memory.size(); i += 4) {
      uint32_t was, now;
      std::memcpy(&was, &before[i], 4);
      std::memcpy(&now, &memory[i], 4);
      const bool codes = f == WeightFormat::mxfp4 && i % 544 < 512;
      ASSERT_EQ(now, codes ? weight_tiles::to_device_order(was) : was) << f << ", byte " << i;
    }
    from_device_order(bank);
    EXPECT_EQ(memory, before) << f;
  }
}

TEST(weight_tiles, ranges_of_bands_are_ranges_of_rows) {
  const Pair p(WeightFormat::mxfp4, 100, 96);
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{16, 48}, {96, 100}, {0, 100}}) {
    Buffer all(DType::f32, {100, 96}), part(DType::f32, {end - begin, 96});
    dequantise(p.weight_tiles, all, {});
    dequantise(p.weight_tiles.row_range(begin, end), part, {});
    const auto a = values(all), b = values(part);
    EXPECT_TRUE(std::equal(b.begin(), b.end(), a.begin() + begin * 96));
  }
  EXPECT_EQ(error_of([&] { p.weight_tiles.row_range(8, 32); }),
            "invalid argument: weights: found rows 8 to 32 of weight tiles, expected multiples of 16");
}

TEST(weight_tiles, operands_that_do_not_fit_are_refused_by_name) {
  Pair p(WeightFormat::mxfp4, 20, 64);
  Buffer x(DType::f32, {1, 64}), y(DType::f32, {1, 20});
  WeightMatrix wrong = p.weight_tiles;
  wrong.n = 40;
  EXPECT_NE(error_of([&] { stored_linear({.x = x, .w = wrong, .y = y}, {}); }).find("weight tiles of shape (2, 544)"),
            std::string::npos);
  Buffer numbers(DType::f32, {20, 64});
  EXPECT_EQ(error_of([&] { quantise(numbers, p.weight_tiles, {}); }),
            "invalid argument: quantise: found a matrix in weight tiles, expected one in rows");
  EXPECT_NE(error_of([&] {
              pack_weight_tiles(p.rows, p.rows);
            }).find("expected one matrix on a cpu in rows and in weight tiles"),
            std::string::npos);
  EXPECT_EQ(error_of([] { weight_tile_bytes(WeightFormat::f32); }),
            "invalid argument: weight tiles: found f32 numbers, expected bf16, fp8 or mxfp4");
}

}  // namespace
}  // namespace ingot
