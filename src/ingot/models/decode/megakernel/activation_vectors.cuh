#pragma once
// The activation vectors of a token's products: each thread reads the words of all blocks until they are complete and
// writes them to shared memory in the order of matrix instructions. The file also contains the publication of a block's
// part of the vectors of `down`.
#include "ingot/gpu/tile/epoch_words.cuh"
#include "ingot/models/decode/megakernel/token_context.cuh"

namespace ingot::decode {

// Adds `sums`, where they are not null, to the residual stream x, and writes x times the norm's weight as the
// activation vector. The factor 1 / rms is left to the epilogue, so that no thread waits for the sum of squares.
template <WeightFormat F, TokenVariant V>
__device__ __forceinline__ void write_normed_vector(const TokenContext<V>& block, const float* weight, const Matrix& w,
                                                    const uint64_t* sums) {
  constexpr bool kFp8 = F == WeightFormat::fp8;
  // words that a thread requests together; a word is two numbers of the vector
  constexpr uint32_t kWords = 3;
  constexpr uint32_t kNext = kFp8 ? 2 : 1;  // distance from the first number of a word to the second
  const auto number = [](uint32_t word) { return kFp8 ? word / 2 * 4 + word % 2 : 2 * word; };
  const uint32_t C = w.cols, words = 32 * w.weight_tiles;
  char* const vector = block.vectors();
  float* const x = block.x();
  float sum = 0;
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < words; first += kWords * kTokenThreads) {
    uint64_t added[kWords][2] = {};
    const auto load = [&] {
#pragma unroll
      for (uint32_t u = 0; u < kWords; ++u) {
        const uint32_t c = number(first + u * kTokenThreads);
        if (!kFp8 && c < C) ptx::load_relaxed(sums + c, added[u]);
        if (kFp8 && c < C) added[u][0] = ptx::load_relaxed(sums + c);
        if (kFp8 && c + kNext < C) added[u][1] = ptx::load_relaxed(sums + c + kNext);
      }
    };
    if (sums != nullptr) load();
    float scale[kWords][2] = {};
#pragma unroll
    for (uint32_t i = 0; i < 2 * kWords; ++i) {
      const uint32_t c = number(first + i / 2 * kTokenThreads) + i % 2 * kNext;
      if (c < C) scale[i / 2][i % 2] = __ldcg(weight + c);
    }
    if (sums != nullptr)
      block.read_again(load, [&] {
        bool all = true;
#pragma unroll
        for (uint32_t i = 0; i < 2 * kWords; ++i)
          all &=
              (RowSum::count(added[i / 2][i % 2]) == 2) | (number(first + i / 2 * kTokenThreads) + i % 2 * kNext >= C);
        return all;
      });
#pragma unroll
    for (uint32_t u = 0; u < kWords; ++u) {
      const uint32_t c = number(first + u * kTokenThreads);
      if (first + u * kTokenThreads >= words) continue;
      float v[2];
#pragma unroll
      for (uint32_t h = 0; h < 2; ++h) {
        v[h] = x[c + h * kNext];
        if (c + h * kNext < C) v[h] += RowSum::value(added[u][h]);
        if (sums != nullptr) x[c + h * kNext] = v[h];
        sum += v[h] * v[h];
        v[h] *= scale[u][h] * weight_tiles::Form<F>::kInputScale;
      }
      *reinterpret_cast<uint32_t*>(vector + 2 * weight_tiles::place(kFp8, c)) = ptx::pack(bf16{}, v[0], v[1]);
    }
  }
  sum = weight_tiles::lanes_sum(sum);
  if (threadIdx.x % 32 == 0) block.m.squares[threadIdx.x / 32] = sum;
}
// Returns 1 / rms of the residual stream. Call after write_normed_vector() and a barrier.
template <TokenVariant V> __device__ __forceinline__ float residual_rstd(const TokenContext<V>& block, float eps) {
  const float per_channel = 1 / float(block.m.token.embedding.C);
  float sum[16];
#pragma unroll
  for (uint32_t w = 0; w < 16; ++w) sum[w] = w < kTokenWarps ? block.m.squares[w] : 0;
#pragma unroll
  for (uint32_t w = 0; w < 8; ++w) sum[w] += sum[w + 8];
  const float even = (sum[0] + sum[4]) + (sum[2] + sum[6]), odd = (sum[1] + sum[5]) + (sum[3] + sum[7]);
  return rsqrtf((even + odd) * per_channel + eps);
}
// Writes the activation vector that the blocks of attention have published with this layer's epoch. Calls meanwhile()
// while the first words are being loaded.
template <WeightFormat F, TokenVariant V, class Meanwhile>
__device__ __forceinline__ void write_attention_vector(const TokenContext<V>& block, uint32_t C, uint32_t epoch,
                                                       Meanwhile&& meanwhile) {
  constexpr uint32_t kWords = 3;  // words of four numbers that a thread requests together
  const tile::EpochWords* const from = block.m.token.attention.mixed;
  char* const vector = block.vectors();
  uint32_t first = threadIdx.x;
#pragma unroll 1
  do {
    tile::EpochWords words[kWords];
    const auto exists = [&](uint32_t u) { return 4 * (first + u * kTokenThreads) < C; };
    const auto load = [&] {
#pragma unroll
      for (uint32_t u = 0; u < kWords; ++u)
        if (exists(u)) words[u] = tile::EpochWords::load(from + first + u * kTokenThreads);
    };
    load();
    if (first == threadIdx.x) meanwhile();
    block.read_again(load, [&] {
      bool all = true;
#pragma unroll
      for (uint32_t u = 0; u < kWords; ++u) all &= (words[u].epoch == epoch) | !exists(u);
      return all;
    });
#pragma unroll
    for (uint32_t u = 0; u < kWords; ++u)
      if (4 * (first + u * kTokenThreads) < weight_tiles::padded(C))
        weight_tiles::put_words4(vector, F, 4 * (first + u * kTokenThreads), words[u].word[0], words[u].word[1]);
    first += kWords * kTokenThreads;
  } while (first < weight_tiles::padded(C) / 4);
}
// Writes the activation vectors of `down`, one vector of C channels for each of the `count` expert slots. A word is
// published with all bits inverted, so that a word of zero is not complete yet.
template <TokenVariant V>
__device__ __forceinline__ void write_expert_vectors(const TokenContext<V>& block, uint32_t C, uint32_t count) {
  constexpr uint32_t kWords = 3;  // words of 16 bytes that a thread requests together
  const uint32_t all = count * uint32_t(weight_tiles::vector_bytes(C)) / 16;
  const char* const from = block.shared_vectors();
  char* const to = block.vectors();
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < all; first += kWords * kTokenThreads) {
    uint64_t words[kWords][2] = {};
    const auto load = [&] {
#pragma unroll
      for (uint32_t u = 0; u < kWords; ++u)
        if (first + u * kTokenThreads < all)
          ptx::load_relaxed_16(from + (first + u * kTokenThreads) * 16, words[u][0], words[u][1]);
    };
    load();
    block.read_again(load, [&] {
      bool complete = true;
#pragma unroll
      for (uint32_t i = 0; i < 2 * kWords; ++i)
        complete &= ((uint32_t(words[i / 2][i % 2]) != 0) & (words[i / 2][i % 2] >> 32 != 0)) |
                    (first + i / 2 * kTokenThreads >= all);
      return complete;
    });
#pragma unroll
    for (uint32_t u = 0; u < kWords; ++u)
      if (first + u * kTokenThreads < all) {
        const uint64_t low = ~words[u][0], high = ~words[u][1];
        *reinterpret_cast<uint4*>(to + (first + u * kTokenThreads) * 16) =
            make_uint4(uint32_t(low), uint32_t(low >> 32), uint32_t(high), uint32_t(high >> 32));
      }
  }
}
// Publishes `value`, the channel that the thread of an even row of gate and up has computed, as part of an activation
// vector of `down`. Called by whole warps, with one thread for each row: row 2 n is the gate of channel n. Two channels
// form a word of a vector. The threads of the last row tile also publish the zeros that pad the vector.
template <TokenVariant V>
__device__ __forceinline__ void publish_channel(const TokenContext<V>& block, const EpilogueRow& row, const Matrix& w,
                                                float value) {
  constexpr bool kFp8 = V.experts == WeightFormat::fp8;
  constexpr uint32_t kNext = kFp8 ? 2 : 1;
  constexpr float kInputScale = weight_tiles::Form<V.experts>::kInputScale;
  const uint32_t width = w.rows / 2, n = row.row / 2;
  if (!row.inside()) value = 0;
  const float next = __shfl_down_sync(~0u, value, 2 * kNext);
  if (!row.exists() || row.row % 2 != 0 || n % (2 * kNext) >= kNext) return;
  char* const vector = block.shared_vectors() + row.slot() * weight_tiles::vector_bytes(width);
  const auto put = [&](uint32_t channel, uint32_t word) {
    ptx::store_relaxed(reinterpret_cast<uint32_t*>(vector + 2 * weight_tiles::place(kFp8, channel)), ~word);
  };
  put(n, ptx::pack(bf16{}, value * kInputScale, next * kInputScale));
  if (n / 8 + 1 == w.row_tiles)
#pragma unroll 1
    for (uint32_t behind = n + 8; behind < weight_tiles::padded(width); behind += 8) put(behind, 0);
}

}  // namespace ingot::decode
