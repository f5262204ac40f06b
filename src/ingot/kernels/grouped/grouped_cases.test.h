#pragma once
// Grouped products in a format, with groups and sizes of choice, against the product in fp64. Storage: testing::
// DeviceBuffer, or testing::EmulatedBuffer where kernels run on the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "ingot/kernels/grouped/grouped.h"
#include "ingot/kernels/quant/weight_tiles.h"
#include "ingot/testing/testing.h"

namespace ingot::grouped_cases {

// A bank of random matrices in a GPU's weight tiles, on the host and on the GPU, and their decoded numbers.
template <class Storage> struct Bank {
  std::vector<uint8_t> memory;
  std::vector<double> numbers;  // (groups, n, k)
  Storage device;

  Bank(WeightFormat f, int64_t groups, int64_t n, int64_t k)
      : memory(size_t(groups * row_tile_count(n) * row_tile_bytes(f, k))),
        numbers(size_t(groups * n * k)),
        device(DType::u8, {int64_t(memory.size())}) {
    const WeightMatrix bank = weight_tiles_at(memory.data(), f, groups, n, k);
    for (int64_t g = 0; g < groups; ++g) {
      std::vector<float> wide(size_t(n * k));
      const Tensor x(wide.data(), {n, k});
      testing::fill_normal(x, 40 + uint64_t(g), g == 1 ? 30 : 0.05);  // scales on both sides of 1
      std::vector<char> data(size_t(n * k * 2)), scales(size_t(n * std::max<int64_t>(4, k)));
      const WeightMatrix rows =
          f == WeightFormat::bf16 ? WeightMatrix(Tensor(data.data(), DType::bf16, {n, k}))
          : f == WeightFormat::fp8
              ? WeightMatrix(f, Tensor(data.data(), DType::u8, {n, k}), Tensor(scales.data(), DType::f32, {n}))
              : WeightMatrix(f, Tensor(data.data(), DType::u8, {n, k / kMxBlock, kMxBlock / 2}),
                             Tensor(scales.data(), DType::u8, {n, k / kMxBlock}));
      if (f == WeightFormat::bf16)
        testing::assign(rows.data, std::vector<double>(wide.begin(), wide.end()));
      else
        quantise(x, rows, {});
      pack_weight_tiles(rows, bank.at(g));
      dequantise(bank.at(g), Tensor(&numbers[size_t(g * n * k)], {n, k}), {});
    }
    to_device_order(bank);
    std::copy(memory.begin(), memory.end(), device.host().template ptr<uint8_t>());
    device.upload();
  }
};

enum class Form { plain, adds, gated };

// call: grouped_linear, or the same with the limits of a GPU.
template <class Storage, class Call = decltype(&grouped_linear)>
void check(WeightFormat f, const std::vector<int32_t>& offsets, int64_t n, int64_t k, Form form,
           Call&& call = grouped_linear) {
  const int64_t groups = int64_t(offsets.size()) - 1, rows = offsets.back();
  SCOPED_TRACE(::testing::Message() << name_of(f) << ", " << rows << " rows of " << groups << " groups, " << n << " x "
                                    << k << ", form " << int(form));
  const bool gated = form == Form::gated;
  const Bank<Storage> bank(f, groups, n, k);
  Storage x(DType::bf16, {rows, k}, (k + 7) / 8 * 8 + 8), bias(DType::f32, {groups, n}),
      starts(DType::i32, {groups + 1}), claims(DType::u32, {1}),
      y(gated ? DType::bf16 : DType::f32, {rows, gated ? n / 2 : n}, n + 8);
  testing::fill_normal(x.host(), 1);
  testing::fill_normal(bias.host(), 2);
  std::copy(offsets.begin(), offsets.end(), starts.host().template ptr<int32_t>());
  if (form == Form::adds) testing::fill_normal(y.host(), 3);
  const std::vector<double> in = testing::values(x.host()), b = testing::values(bias.host()),
                            old = testing::values(y.host());
  claims.host().template ptr<uint32_t>()[0] = 0;
  for (Storage* d : {&x, &bias, &starts, &claims, &y}) d->upload();
  call(GroupedLinear{.x = x,
                     .w = bank.device.tensor().template ptr<uint8_t>(),
                     .format = f,
                     .groups = groups,
                     .n = n,
                     .bias = bias.tensor().template ptr<float>(),
                     .offsets = starts.tensor().template ptr<int32_t>(),
                     .y = y,
                     .add = form == Form::adds,
                     .claims = groups > 1 ? claims.tensor().template ptr<uint32_t>() : nullptr},
       Stream{});
  claims.download();
  EXPECT_EQ(claims.host().template ptr<uint32_t>()[0], 0u) << "what the next launch begins with";
  y.download();
  EXPECT_TRUE(y.untouched()) << "written outside of y";
  const std::vector<double> got = testing::values(y.host());
  int wrong = 0;
  for (int64_t g = 0; g < groups; ++g)
    for (int64_t r = offsets[size_t(g)]; r < offsets[size_t(g + 1)]; ++r) {
      std::vector<double> sum(static_cast<size_t>(n)), size(sum);
      for (int64_t i = 0; i < n; ++i) {
        const double* const w = &bank.numbers[size_t((g * n + i) * k)];
        double s = b[size_t(g * n + i)], a = std::fabs(s);
        for (int64_t c = 0; c < k; ++c) {
          const double v = w[c] * in[size_t(r * k + c)];
          s += v, a += std::fabs(v);
        }
        sum[size_t(i)] = s, size[size_t(i)] = a * double(k) * 0x1p-23;  // a tensor core truncates its addends
      }
      for (int64_t i = 0; i < (gated ? n / 2 : n); ++i) {
        double want = sum[size_t(i)], allowed = size[size_t(i)];
        const size_t at = size_t(r * (gated ? n / 2 : n) + i);
        if (form == Form::adds) want += old[at], allowed += std::fabs(want) * 0x1p-23;
        if (gated) {
          const double e0 = size[size_t(2 * i)], e1 = size[size_t(2 * i + 1)];
          const double gate = std::min(sum[size_t(2 * i)], 7.), up = std::clamp(sum[size_t(2 * i + 1)], -7., 7.);
          want = gate / (1 + std::exp(-1.702 * gate)) * (up + 1);
          // |gate'| <= 1.2 and |gate| <= 7 on this side of the clamp; then bf16, and the hardware's exponential.
          allowed = 1.2 * e0 * 8 + std::fabs(gate) * e1 + std::fabs(want) * (0x1p-8 + 0x1p-15) + 1e-30;
        }
        if (std::fabs(got[at] - want) <= allowed) continue;
        if (++wrong <= 4) ADD_FAILURE() << "row " << r << ", " << i << ": found " << got[at] << ", expected " << want;
      }
    }
  EXPECT_EQ(wrong, 0);
}

}  // namespace ingot::grouped_cases
