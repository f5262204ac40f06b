#pragma once
// The end of a portable kernel's tile: scales, bias, and the gate or the addition to y. The code has no branch around
// an element. ../parts/finish.cuh would take some 57 instructions for each gated element, and its branches would keep
// the compiler from interleaving them. With wide tiles a multiprocessor holds one block, so no other warp computes
// products during that time.
#include "ingot/gpu/ptx/convert.cuh"
#include "ingot/gpu/ptx/math.cuh"
#include "ingot/gpu/ptx/settle.cuh"
#include "ingot/kernels/grouped/parts/finish.cuh"

namespace ingot::cuda::grouped_portable {

using namespace grouped;

// The lane's number, for code after a loop whose sums leave no registers. Without settle() the compiler would compute
// the values that depend on this number before the loop, and keep them in registers.
__device__ __forceinline__ uint32_t settled_lane() {
  uint32_t thread = threadIdx.x;
  ptx::settle(thread);
  return thread % 32;
}

// Computes grouped::gate() with approximate powers and reciprocals: relative error 2^-21.
__device__ __forceinline__ float approximate_gate(float gate, float up, float limit, float minus_alpha_log2e) {
  gate = fminf(gate, limit);
  up = fminf(fmaxf(up, -limit), limit);
  return gate * (up + 1) * ptx::reciprocal_approx(1 + ptx::exp2_approx(gate * minus_alpha_log2e));
}

// Exchanges a word with the lane whose number differs in one bit: the lane with the bit clear keeps `first` and
// receives the other lane's `first`; the lane with the bit set keeps and receives `second`. `low` is the word of the
// lane with the bit clear, `high` that of the lane with the bit set.
__device__ __forceinline__ void exchange(uint32_t first, uint32_t second, uint32_t bit, bool is_second, uint32_t& low,
                                         uint32_t& high) {
  const uint32_t other = __shfl_xor_sync(~0u, is_second ? first : second, int(bit));
  low = is_second ? other : first;
  high = is_second ? second : other;
}

// Applies the gate to a row tile's sums and stores the result. Thread (g, t) has rows g and g + 8 of the weights, and
// rows 2 t and 2 t + 1 of every 8 rows of x. Gate and up of a channel are the sums of lanes g and g + 1. Lanes exchange
// until each has 8 channels of one row of x, which are 16 bytes of y.
template <int kRows>
__device__ __forceinline__ void finish_gated(const Product& p, const Tile& t, uint32_t row_tile, const Ends& e,
                                             uint32_t first_row, const float (&d)[kRows / 2]) {
  constexpr int kBlocks = kRows / 8;
  const uint32_t lane = settled_lane(), g = lane / 4;
  const bool odd = g % 2 == 1, second_pair = g / 2 % 2 == 1, second_four = g / 4 == 1;
  const float limit = p.limit > 0 ? p.limit : INFINITY, power = -p.alpha * 1.4426950408889634f;
  const uint32_t channels = p.n / 2, channel = row_tile * 8;
  const bool whole = p.y_stride % 8 == 0 && (reinterpret_cast<uintptr_t>(p.y) & 15) == 0 && channel + 8 <= channels;
  // Of four blocks of 8 rows, this lane stores one row of one block.
  const uint32_t my_row = first_row + 16 * second_four + 8 * second_pair + lane % 4 * 2 + odd;
  bf16* to = static_cast<bf16*>(p.y) + size_t(my_row) * p.y_stride + channel;
#pragma unroll
  for (int first = 0; first < kBlocks; first += 4) {
    uint32_t words[2][2];  // 4 channels of each half of the row tile
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      uint32_t pairs[2];
#pragma unroll
      for (int two = 0; two < 2; ++two) {
        float of_block[2];
#pragma unroll
        for (int one = 0; one < 2; ++one) {
          const int j = first + 2 * two + one;
          of_block[one] = 0;
          if (j >= kBlocks) continue;
          const float v[2] = {d[4 * j + 2 * half] * e.scale[half] + e.bias[half],
                              d[4 * j + 2 * half + 1] * e.scale[half] + e.bias[half]};
          uint32_t gate, up;
          exchange(__float_as_uint(v[0]), __float_as_uint(v[1]), 4, odd, gate, up);
          of_block[one] = approximate_gate(__uint_as_float(gate), __uint_as_float(up), limit, power);
        }
        uint32_t low, high;
        exchange(__float_as_uint(of_block[0]), __float_as_uint(of_block[1]), 8, second_pair, low, high);
        pairs[two] = ptx::pack(bf16{}, __uint_as_float(low), __uint_as_float(high));
      }
      exchange(pairs[0], pairs[1], 16, second_four, words[half][0], words[half][1]);
    }
    const bool here = my_row + 8 * first < t.row_end && my_row + 8 * first < first_row + kRows;
    if (whole) {
      if (here) *reinterpret_cast<uint4*>(to) = make_uint4(words[0][0], words[0][1], words[1][0], words[1][1]);
    } else if (here) {
#pragma unroll
      for (uint32_t c = 0; c < 8; ++c) {
        bf16 one;
        one.bits = uint16_t(words[c / 4][c / 2 % 2] >> (c % 2 * 16));
        if (channel + c < channels) to[c] = one;
      }
    }
    to += 32 * p.y_stride;
  }
}

// A row tile's sums, stored or added to y.
template <int kRows>
__device__ __forceinline__ void finish_plain(const Product& p, const Tile& t, uint32_t row_tile, const Ends& e,
                                             uint32_t first_row, const float (&d)[kRows / 2]) {
  static_assert(kRows % 16 == 0, "the last blocks are whole");
  constexpr int kAtOnce = kRows / 8 % 4 == 0 ? 4 : 2;  // blocks of 8 rows whose old values are loaded together
  const uint32_t lane = settled_lane(), n = 16 * row_tile + lane / 4, row = first_row + lane % 4 * 2;
  const bool has[2] = {n < p.n, n + 8 < p.n};
  float* to = static_cast<float*>(p.y) + size_t(row) * p.y_stride + n;
#pragma unroll
  for (int first = 0; first < kRows / 8; first += kAtOnce) {
    float old[4 * kAtOnce] = {};
    const auto each = [&](auto&& use) {
      float* at = to;
#pragma unroll
      for (int i = 0; i < 4 * kAtOnce; ++i) {  // the order of d: two columns of each half
        const uint32_t r = row + 8 * (first + i / 4) + i % 2;
        float* const y = (i % 2 == 0 ? at : at + p.y_stride) + 8 * (i / 2 % 2);
        if (r < t.row_end && has[i / 2 % 2]) use(i, i / 2 % 2, y);
        if (i % 4 == 3) at += 8 * p.y_stride;
      }
    };
    if (p.add) each([&](int i, int, const float* y) { old[i] = *y; });
    each([&](int i, int half, float* y) { *y = old[i] + (d[4 * first + i] * e.scale[half] + e.bias[half]); });
    to += 8 * kAtOnce * p.y_stride;
  }
}

}  // namespace ingot::cuda::grouped_portable
