#pragma once
// The columns that a token's products multiply: what all blocks have handed over, waited for word by word and written
// to shared memory in the order of matrix instructions; and how a block hands over its part of down's columns.
#include "ingot/gpu/tile/stamped.cuh"
#include "ingot/models/decode/megakernel/token_block.cuh"

namespace ingot::decode {

class TokenColumns : public TokenBlock {
 public:
  // x += sums, where there are any; x times the norm's weight becomes the column, a word of two numbers at a time.
  template <WeightFormat F>
  __device__ __forceinline__ void stage_normed(const float* weight, const Matrix& w, const uint64_t* sums) const {
    constexpr bool kFp8 = F == WeightFormat::fp8;
    constexpr uint32_t kHeld = 3,
                       kNext = kFp8 ? 2 : 1;  // words on their way at once; from a word's number to the other
    const auto number = [](uint32_t word) { return kFp8 ? word / 2 * 4 + word % 2 : 2 * word; };
    const uint32_t C = w.cols, words = 32 * w.weight_tiles;
    char* const column = stage();
    float* const x = this->x();
    float sum = 0;
#pragma unroll 1
    for (uint32_t first = threadIdx.x; first < words; first += kHeld * kTokenThreads) {
      uint64_t added[kHeld][2] = {};
      const auto load = [&] {
#pragma unroll
        for (uint32_t u = 0; u < kHeld; ++u) {
          const uint32_t c = number(first + u * kTokenThreads);
          if (!kFp8 && c < C) ptx::load_relaxed(sums + c, added[u]);
          if (kFp8 && c < C) added[u][0] = ptx::load_relaxed(sums + c);
          if (kFp8 && c + kNext < C) added[u][1] = ptx::load_relaxed(sums + c + kNext);
        }
      };
      if (sums != nullptr) load();
      float scale[kHeld][2] = {};
#pragma unroll
      for (uint32_t i = 0; i < 2 * kHeld; ++i) {
        const uint32_t c = number(first + i / 2 * kTokenThreads) + i % 2 * kNext;
        if (c < C) scale[i / 2][i % 2] = __ldcg(weight + c);
      }
      if (sums != nullptr)
        read_again(load, [&] {
          bool all = true;
#pragma unroll
          for (uint32_t i = 0; i < 2 * kHeld; ++i)
            all &= (RowSum::count(added[i / 2][i % 2]) == 2) |
                   (number(first + i / 2 * kTokenThreads) + i % 2 * kNext >= C);
          return all;
        });
#pragma unroll
      for (uint32_t u = 0; u < kHeld; ++u) {
        const uint32_t c = number(first + u * kTokenThreads);
        if (first + u * kTokenThreads >= words) continue;
        float v[2];
#pragma unroll
        for (uint32_t h = 0; h < 2; ++h) {
          v[h] = x[c + h * kNext];
          if (c + h * kNext < C) v[h] += RowSum::value(added[u][h]);
          if (sums != nullptr) x[c + h * kNext] = v[h];
          sum += v[h] * v[h];
          v[h] *= scale[u][h] * weight_tiles::Form<F>::kLift;
        }
        *reinterpret_cast<uint32_t*>(column + 2 * weight_tiles::place(kFp8, c)) = ptx::pack(bf16{}, v[0], v[1]);
      }
    }
    sum = weight_tiles::lanes_sum(sum);
    if (threadIdx.x % 32 == 0) m_.squares[threadIdx.x / 32] = sum;
  }
  // Of numbers of the hidden size, after a barrier.
  __device__ __forceinline__ float rstd(float eps) const {
    const float of_all = 1 / float(m_.token.embedding.C);
    float sum[16];
#pragma unroll
    for (uint32_t w = 0; w < 16; ++w) sum[w] = w < kTokenWarps ? m_.squares[w] : 0;
#pragma unroll
    for (uint32_t w = 0; w < 8; ++w) sum[w] += sum[w + 8];
    const float halves = (sum[0] + sum[4]) + (sum[2] + sum[6]), others = (sum[1] + sum[5]) + (sum[3] + sum[7]);
    return rsqrtf((halves + others) * of_all + eps);
  }
  // What attention has published of this layer; meanwhile() while it travels.
  template <WeightFormat D, class Meanwhile>
  __device__ __forceinline__ void stage_mixed(uint32_t C, uint32_t stamp, Meanwhile&& meanwhile) const {
    constexpr uint32_t kHeld = 3;  // on their way at once
    const tile::Stamped* const from = m_.token.attention.mixed;
    char* const column = stage();
    uint32_t first = threadIdx.x;
#pragma unroll 1
    do {
      tile::Stamped held[kHeld];
      const auto is_there = [&](uint32_t u) { return 4 * (first + u * kTokenThreads) < C; };
      const auto load = [&] {
#pragma unroll
        for (uint32_t u = 0; u < kHeld; ++u)
          if (is_there(u)) held[u] = tile::Stamped::load(from + first + u * kTokenThreads);
      };
      load();
      if (first == threadIdx.x) meanwhile();
      read_again(load, [&] {
        bool all = true;
#pragma unroll
        for (uint32_t u = 0; u < kHeld; ++u) all &= (held[u].stamp == stamp) | !is_there(u);
        return all;
      });
#pragma unroll
      for (uint32_t u = 0; u < kHeld; ++u)
        if (4 * (first + u * kTokenThreads) < weight_tiles::padded(C))
          weight_tiles::put_words4(column, D, 4 * (first + u * kTokenThreads), held[u].word[0], held[u].word[1]);
      first += kHeld * kTokenThreads;
    } while (first < weight_tiles::padded(C) / 4);
  }
  // All columns of `down`, of C channels each.
  __device__ __forceinline__ void stage_columns(uint32_t C, uint32_t count) const {
    constexpr uint32_t kHeld = 3;  // pieces of 16 bytes on their way at once
    const uint32_t all = count * uint32_t(weight_tiles::column_bytes(C)) / 16;
    const char* const from = columns();
    char* const to = stage();
#pragma unroll 1
    for (uint32_t first = threadIdx.x; first < all; first += kHeld * kTokenThreads) {
      uint64_t held[kHeld][2] = {};
      const auto load = [&] {
#pragma unroll
        for (uint32_t u = 0; u < kHeld; ++u)
          if (first + u * kTokenThreads < all)
            ptx::load_relaxed_16(from + (first + u * kTokenThreads) * 16, held[u][0], held[u][1]);
      };
      load();
      read_again(load, [&] {
        bool there = true;
#pragma unroll
        for (uint32_t i = 0; i < 2 * kHeld; ++i)
          there &= ((uint32_t(held[i / 2][i % 2]) != 0) & (held[i / 2][i % 2] >> 32 != 0)) |
                   (first + i / 2 * kTokenThreads >= all);
        return there;
      });
#pragma unroll
      for (uint32_t u = 0; u < kHeld; ++u)
        if (first + u * kTokenThreads < all) {
          const uint64_t low = ~held[u][0], high = ~held[u][1];
          *reinterpret_cast<uint4*>(to + (first + u * kTokenThreads) * 16) =
              make_uint4(uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32));
        }
    }
  }
  // By whole warps: lane `row` of 16 has channel n in its row 2 (n % 8); two channels are a word of a column. Whoever
  // has the last ones adds the zeros behind them.
  template <WeightFormat E>
  __device__ __forceinline__ void put_channel(const RowPlace& row, const Matrix& w, float value) const {
    constexpr bool kFp8 = E == WeightFormat::fp8;
    constexpr uint32_t kNext = kFp8 ? 2 : 1;
    constexpr float kLift = weight_tiles::Form<E>::kLift;
    const uint32_t width = w.rows / 2, n = row.n / 2;
    if (!row.mine()) value = 0;
    const float next = __shfl_down_sync(~0u, value, 2 * kNext);
    if (!row.ends() || row.n % 2 != 0 || n % (2 * kNext) >= kNext) return;
    char* const column = columns() + row.entry() * weight_tiles::column_bytes(width);
    const auto put = [&](uint32_t channel, uint32_t word) {
      ptx::store_relaxed(reinterpret_cast<uint32_t*>(column + 2 * weight_tiles::place(kFp8, channel)), ~word);
    };
    put(n, ptx::pack(bf16{}, value * kLift, next * kLift));
    if (n / 8 + 1 == w.bands)
#pragma unroll 1
      for (uint32_t behind = n + 8; behind < weight_tiles::padded(width); behind += 8) put(behind, 0);
  }
};

}  // namespace ingot::decode
