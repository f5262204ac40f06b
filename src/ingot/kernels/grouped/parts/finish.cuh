#pragma once
// The end of a tile: scales, bias, and the gate or the addition to y.
#include "ingot/kernels/grouped/grouped_kernel.h"
#include "ingot/kernels/grouped/parts/decode.cuh"
#include "ingot/kernels/grouped/schedule.h"

namespace ingot::grouped {

__device__ __forceinline__ float gate(float gate, float up, float limit, float alpha) {
  if (limit > 0) {
    gate = fminf(gate, limit);
    up = fminf(fmaxf(up, -limit), limit);
  }
  return gate / (1 + __expf(-alpha * gate)) * (up + 1);
}

// The scale and the bias of rows g and g + 8 of a row tile.
struct Ends {
  float scale[2], bias[2];
};
template <WeightFormat F> __device__ __forceinline__ Ends ends_of(const Product& p, const Tile& t, uint32_t row_tile) {
  const uint32_t g = threadIdx.x % 32 / 4;
  Ends e;
#pragma unroll
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t n = 16 * row_tile + g + 8 * half;
    e.scale[half] = kOutputScale<F>;
    if constexpr (F == WeightFormat::fp8)
      if (row_tile < p.row_tiles)
        e.scale[half] *=
            reinterpret_cast<const float*>(p.w + t.group * p.matrix_bytes + row_tile * p.row_tile_bytes +
                                           size_t(p.weight_tiles) * weight_tiles::Form<F>::kBytes)[g + 8 * half];
    const bool has_bias = p.bias != nullptr && n < p.n && (p.parts == 1 || t.group == 0);
    e.bias[half] = has_bias ? p.bias[size_t(t.group) * p.n + n] : 0;
  }
  return e;
}

// A row tile's sums: thread (g, t) has rows g and g + 8 of the weights, and rows 2 t and 2 t + 1 of every 8 rows of x.
template <WeightFormat F, int kRows, bool kGated>
__device__ __forceinline__ void finish(const Product& p, const Tile& t, uint32_t row_tile, const Ends& e,
                                       const float (&d)[kRows / 2]) {
  const uint32_t lane = threadIdx.x % 32, g = lane / 4;
  if constexpr (kGated) {
#pragma unroll
    for (int j = 0; j < kRows / 8; ++j)
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const float v[2] = {d[4 * j + 2 * half] * e.scale[half] + e.bias[half],
                            d[4 * j + 2 * half + 1] * e.scale[half] + e.bias[half]};
        // Gate and up of a channel lie in neighbouring threads' rows: each of the two threads computes one of the two
        // rows of x.
        const bool second = g % 2 == 1;
        const float other = __shfl_xor_sync(~0u, second ? v[0] : v[1], 4);
        const uint32_t n = 16 * row_tile + 8 * half + g, r = t.row + 8 * j + lane % 4 * 2 + second;
        if (r < t.row_end && n < p.n)
          static_cast<bf16*>(p.y)[size_t(r) * p.y_stride + n / 2] =
              bf16(gate(second ? other : v[0], second ? v[1] : other, p.limit, p.alpha));
      }
  } else {
    // The old values of y are loaded together: loading them one after the other took as long as the products.
    constexpr int kMost = kRows <= 80 ? 1 : 4, kTogether = kRows / 8 < kMost ? kRows / 8 : kMost;
#pragma unroll
    for (int first = 0; first < kRows / 8; first += kTogether) {
      float old[4 * kTogether] = {};
      const auto each = [&](auto&& use) {
#pragma unroll
        for (int i = 0; i < 4 * kTogether; ++i) {  // as in d: two columns of each half
          const uint32_t half = i / 2 % 2, row = t.row + 8 * (first + i / 4) + lane % 4 * 2 + i % 2;
          const uint32_t n = 16 * row_tile + 8 * half + g;
          if (row < t.row_end && n < p.n) use(i, half, static_cast<float*>(p.y) + size_t(row) * p.y_stride + n);
        }
      };
      if (p.add) each([&](int i, uint32_t, const float* y) { old[i] = *y; });
      each([&](int i, uint32_t half, float* y) { *y = old[i] + (d[4 * first + i] * e.scale[half] + e.bias[half]); });
    }
  }
}

}  // namespace ingot::grouped
